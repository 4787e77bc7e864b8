"""`show`: the library's source code in a notebook, exactly as it runs."""

import html
import inspect
import textwrap
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Code:
    """Lines of a file, with highlighting in a notebook."""

    text: str
    caption: str  # "labkit/parallel/ddp/ddp.py, lines 40 to 62"

    def __repr__(self) -> str:
        return f"# {self.caption}\n{self.text}"

    def _repr_html_(self) -> str:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        # Inline colors, so that the page needs no style sheet.
        style = (
            "padding: 6px 10px; line-height: 1.35; overflow-x: auto; background: #f7f7f7; "
            "font-family: monospace; font-size: 90%"
        )
        formatter = HtmlFormatter(noclasses=True, style="friendly", prestyles=style)
        body = highlight(self.text, PythonLexer(), formatter)
        return f'<div style="opacity: 0.7">{html.escape(self.caption)}</div>{body}'


def show(target: Any, since: str = "", until: str = "") -> Code:
    """The source of a function, method, class or module.

    Args:
        target: the object itself, or its path: "parallel/ddp/ddp.py:DDP.forward".
        since, until: text in the first line to show, and in the line after the last line.

    Raises ValueError for an unknown path or text: a lab must fail when the code has changed."""
    if isinstance(target, str):
        target = _find(target)
    target = inspect.unwrap(target) if callable(target) else target
    lines, first = inspect.getsourcelines(target)
    begin = _line_with(since, lines, 0) if since else 0
    end = _line_with(until, lines, begin + 1) if until else len(lines)
    while end > begin + 1 and not lines[end - 1].strip():
        end -= 1
    first = max(first, 1) + begin
    path = Path(inspect.getsourcefile(target) or "")
    if path.is_relative_to(PACKAGE.parent):
        path = path.relative_to(PACKAGE.parent)
    text = textwrap.dedent("".join(lines[begin:end])).rstrip()
    return Code(text, f"{path.as_posix()}, lines {first} to {first + end - begin - 1}")


def _find(place: str) -> Any:
    """The object at a path such as "comm/collectives/broadcast.py:tree_broadcast"."""
    file, _, name = place.partition(":")
    try:
        target: Any = import_module("labkit." + file.removesuffix(".py").replace("/", "."))
    except ModuleNotFoundError:
        raise ValueError(f"show({place!r}): labkit has no file {file!r}") from None
    for part in filter(None, name.split(".")):
        if not hasattr(target, part):
            raise ValueError(f"show({place!r}): {file} has no {name!r}")
        target = getattr(target, part)
    return target


def _line_with(words: str, lines: list[str], start: int) -> int:
    for number in range(start, len(lines)):
        if words in lines[number]:
            return number
    raise ValueError(f"show: no line has {words!r}; the code has changed, so update the lab")
