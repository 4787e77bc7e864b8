"""A notebook cell on a rank: run its statements, return the value of its last expression."""

import ast
import linecache
from typing import Any


def run(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Run `source` in `namespace`; the value of a last expression, or None."""
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), namespace)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), filename, "eval"), namespace)
