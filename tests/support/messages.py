"""Lists every error message and warning of labkit, to read them in one sitting.

    python tests/support/messages.py [labkit/parallel ...]

Each line: file, line, exception, message; `{...}` is filled in at run time."""

import ast
import sys
from collections.abc import Iterator

from places import ROOT


def messages(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, exception, message) of each `raise Error("...")`, `fail("...")` and warning."""
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and call.args:
            name = ast.unparse(call.func)
            if isinstance(node, ast.Raise) or name in ("fail", "warnings.warn"):
                yield node.lineno, name, " | ".join(map(_text, call.args))


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(map(_text, node.values))
        case ast.BinOp():
            return _text(node.left) + _text(node.right)
        case ast.FormattedValue():
            return f"{{{ast.unparse(node.value)}}}"
        case _:
            return f"<{ast.unparse(node)}>"


def main(names: list[str]) -> None:
    files = [
        file
        for name in names or ["labkit", "notebooks/src"]
        for file in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")))
        if file.name not in ("lab.py", "wrong_answers.py")
    ]
    for file in files:
        for line, name, message in messages(file.read_text(encoding="utf-8")):
            print(f"{file.relative_to(ROOT)}:{line} {name}: {message}")


if __name__ == "__main__":
    main(sys.argv[1:])
