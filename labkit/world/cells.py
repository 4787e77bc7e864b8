"""A notebook cell on a rank: run its statements, return the value of its last expression."""

import ast
import linecache
import sys
from pathlib import Path
from typing import Any


def run(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Run `source` in `namespace`; the value of a last expression, or None."""
    remember(source, filename)
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, filename, "exec"), namespace)
        return None
    tree.body.pop()
    exec(compile(tree, filename, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), filename, "eval"), namespace)


def check(source: str, filename: str) -> None:
    """Raises SyntaxError for what is not Python, saying so of IPython's own commands."""
    try:
        ast.parse(source, filename)
    except SyntaxError as error:
        if (error.text or "").lstrip().startswith(("!", "%")):
            error.add_note("Ranks run plain Python: IPython's ! and % commands do not work there.")
        raise


def remember(source: str, filename: str) -> None:
    """Let tracebacks show the lines of `source`."""
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)


def with_titles(text: str) -> str:
    """`text` with a notebook's cells called as the notebook does, In[3] for /tmp/.../21.py."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    for file, number in getattr(getattr(shell, "compile", None), "_filename_map", {}).items():
        text = text.replace(f'File "{file}"', f"Cell In[{number}]")
        text = text.replace(f"{Path(file).name}:", f"In[{number}]:")
    return text
