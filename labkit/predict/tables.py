"""The same quantities from several sources, side by side, as text and in a notebook.

>>> table(formula={"sent_bytes": 6144, "step_s": 2.0}, replayed={"sent_bytes": 6144, "step_s": 2.1})
              formula  replayed
sent (bytes)    6,144     6,144  ✓ equal
step (s)            2       2.1  replayed 1.05 × the formula
"""

import html
from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose

Number = int | float
UNITS = {"bytes", "gb", "s", "ms", "flops"}


@dataclass(frozen=True)
class Table:
    """Rows of text under headers, aligned in a terminal and as HTML in a notebook."""

    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def __repr__(self) -> str:
        table, lines = [self.heads, *self.rows], []
        first, *middle, _ = (max(map(len, column)) for column in zip(*table))
        for name, *cells, last in table:
            aligned = [f"{cell:>{width}}" for cell, width in zip(cells, middle)]
            lines.append("  ".join([f"{name:<{first}}", *aligned, last]).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        sides = ("left", *["right"] * (len(self.heads) - 2), "left")
        head = "".join(f"<th>{html.escape(text)}</th>" for text in self.heads)
        body = ""
        for row in self.rows:
            first, *middle, last = map(html.escape, row)  # the last column alone may wrap
            cells = zip(sides, (first, *(x.replace(" ", "&nbsp;") for x in middle), last))
            tds = (f'<td style="text-align: {side}">{text}</td>' for side, text in cells)
            body += f"<tr>{''.join(tds)}</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def table(**sources: Mapping[str, Number]) -> Table:
    """Compare the same quantities from several sources, such as formula, replay and measurement: a
    column per source, a row per quantity, and the ratio to the first source. Names end in the unit
    (`sent_bytes`, `step_s`). Rows that the first source lacks are not compared. Counts match if
    they are equal, floats if they are equal up to rounding. Raises ValueError without numbers."""
    names = list(dict.fromkeys(name for numbers in sources.values() for name in numbers))
    if not names:
        raise ValueError(
            "table() needs numbers, with a name for each source: table(formula={'step_s': 0.5}, "
            "measured={'step_s': 0.6})"
        )
    rows = []
    for name in names:
        cells = [rounded(x[name]) if name in x else "" for x in sources.values()]
        rows.append((label(name), *cells, _compared(name, sources)))
    return Table(("", *(source.replace("_", " ") for source in sources), ""), rows)


def label(name: str) -> str:
    """A readable name, such as "sent by all (bytes)" for sent_by_all_bytes."""
    words, _, unit = name.rpartition("_")
    shown = unit.replace("gb", "GB")
    label = f"{words} ({shown})" if words and unit in UNITS else name
    return label.replace("_", " ")


def in_full(number: Number) -> str:
    """Format with commas and all digits, and a whole float without ".0"."""
    whole = isinstance(number, float) and number.is_integer()
    return f"{int(number) if whole else number:,}"


def rounded(number: Number) -> str:
    """As `in_full`, but round fractions to four digits, or to integers from 10,000 on."""
    if isinstance(number, int) or number.is_integer():
        return in_full(number)
    return f"{number:,.0f}" if 1e4 <= abs(number) < float("inf") else f"{number:.4g}"


def _compared(name: str, sources: Mapping[str, Mapping[str, Number]]) -> str:
    (first, numbers), *rest = sources.items()
    others = {source: x[name] for source, x in rest if name in x}
    if name not in numbers or not others:
        return ""
    reference = numbers[name]
    if all(
        other == reference  # counts must be equal; a sum of floats may have rounded differently
        or (not isinstance(other, int) and isclose(other, reference, rel_tol=1e-9))
        for other in others.values()
    ):
        return "✓ equal"
    if not reference:
        return ""  # no ratio to 0
    nudge = 1 + 1e-9  # a tie, as in 11/8, is rounded up on every machine
    ratios = (f"{source} {nudge * other / reference:.3g} ×" for source, other in others.items())
    return f"{', '.join(ratios)} the {first}".replace("_", " ")
