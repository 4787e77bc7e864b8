"""Runs a notebook cell on a rank and returns the value of its last expression."""

import ast
import linecache
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.runtime.output import running_ipython


def run(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Run `source` in `namespace`; return the value of its final expression, if any, else None."""
    register_source(source, filename)
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, filename, "exec"), namespace)
        return None
    tree.body.pop()
    exec(compile(tree, filename, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), filename, "eval"), namespace)


@dataclass(frozen=True)
class Shown:
    """A rank's value as a notebook displays it; the value itself stays on the rank."""

    text: str
    html: str | None = None

    def __repr__(self) -> str:
        return self.text


def shown(value: Any) -> Shown | None:
    """The display form of `value`; None for None. Never raises."""
    if value is None:
        return None
    try:
        to_html = getattr(value, "_repr_html_", None)
        html = to_html() if to_html is not None and not isinstance(value, type) else None
        return Shown("".join(repr(value)), html if isinstance(html, str) else None)
    except Exception as error:
        return Shown(f"<a {type(value).__name__}; its repr raised {type(error).__name__}>")


def check(source: str, filename: str) -> None:
    """Raises SyntaxError for invalid Python, with a note on IPython commands or a bare `await`."""
    register_source(source, filename)
    try:
        compile(source, filename, "exec", dont_inherit=True)
    except SyntaxError as error:
        if (error.text or "").lstrip().startswith(("!", "%")):
            error.add_note("Ranks run plain Python: IPython's ! and % commands do not work.")
        if "'await'" in (error.msg or ""):
            error.add_note("On a rank, write asyncio.run(...) instead of a bare await.")
        raise


def register_source(source: str, filename: str) -> None:
    """Register `source` with linecache, so that tracebacks show its lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)


def with_titles(text: str) -> str:
    """Replace the file names of cells in `text` with their labels: 21.py becomes In[3]."""
    compiler = getattr(running_ipython(), "compile", None)
    for file, number in getattr(compiler, "_filename_map", {}).items():
        text = text.replace(f'File "{file}"', f"Cell In[{number}]")
        text = text.replace(f"{Path(file).name}:", f"In[{number}]:")
    return text
