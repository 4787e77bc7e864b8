"""Commit to a number, run, and see both side by side.

guess = predict(sent_bytes=3 * 4096, messages=3)     # before the run
guess.beside(sent_bytes=measured, messages=counted)  # after it
"""

import html
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from labkit.check.findings import CheckFailed, brief, kind

Number = int | float
UNITS = {"bytes", "gb", "s", "ms", "flops"}


def predict(*unnamed: Any, **numbers: Any) -> "Prediction":
    """Note predictions, each under a name with its unit; none yet for `predict()`. Raises
    CheckFailed for one that is still to be made (`...`), has no name or is no number."""
    if unnamed:
        raise CheckFailed(
            f"a prediction has no name: {', '.join(map(brief, unnamed))}.",
            hint="Name each, as in predict(sent_bytes=4096).",
        )
    for name, value in numbers.items():
        if isinstance(value, EllipsisType):
            raise CheckFailed(
                f"{name} is not predicted yet.",
                hint="Replace the ... by a number or a formula. A wrong one costs nothing.",
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckFailed(f"{name} is {kind(value)}, but a number is wanted.")
    return Prediction(numbers)


@dataclass(frozen=True)
class Prediction:
    """The numbers a student has committed to."""

    numbers: dict[str, Number]

    def __repr__(self) -> str:
        return "predicted: " + ", ".join(
            f"{_label(n)} = {_text(v)}" for n, v in self.numbers.items()
        )

    def beside(self, heading: str = "measured", /, **measured: Number) -> "Comparison":
        """The predictions beside what was measured, under the same names. `heading` says where
        those numbers are from, if not measured."""
        if not self.numbers:
            raise CheckFailed(
                "nothing is predicted yet.",
                hint="Fill in your prediction in step 3 first, and run its cell.",
            )
        if measured.keys() != self.numbers.keys():
            raise ValueError(
                f"beside({', '.join(measured)}): predicted was {', '.join(self.numbers)}; "
                "give the same names"
            )
        rows = [(name, self.numbers[name], measured[name]) for name in self.numbers]
        return Comparison(rows, heading)


@dataclass(frozen=True)
class Comparison:
    """Name, predicted and measured; a row each."""

    rows: list[tuple[str, Number, Number]]
    heading: str = "measured"

    def _table(self) -> list[tuple[str, str, str, str]]:
        return [
            (_label(n), _text(p), _text(m), _verdict(p, m, self.heading)) for n, p, m in self.rows
        ]

    def __repr__(self) -> str:
        table = [("", "predicted", self.heading, ""), *self._table()]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        return "\n".join(
            f"{n:<{widths[0]}}  {p:>{widths[1]}}  {m:>{widths[2]}}  {v}".rstrip()
            for n, p, m, v in table
        )

    def _repr_html_(self) -> str:
        cells = [
            "".join(
                f'<td style="text-align: {side}">{html.escape(text)}</td>'
                for side, text in zip(("left", "right", "right", "left"), row)
            )
            for row in self._table()
        ]
        heads = ("", "predicted", html.escape(self.heading), "")
        head = "".join(f"<th>{text}</th>" for text in heads)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _label(name: str) -> str:
    """A name as a person writes it: "sent by all (bytes)" for sent_by_all_bytes."""
    words, _, unit = name.rpartition("_")
    label = f"{words} ({unit})" if words and unit in UNITS else name
    return label.replace("_", " ")


def _text(number: Number) -> str:
    """With commas, and without the ".0" of a whole number: 2 * S * 3 / 4 is no less a count."""
    whole = isinstance(number, float) and number.is_integer()
    return f"{int(number) if whole else number:,}"


def _verdict(predicted: Number, measured: Number, heading: str) -> str:
    if predicted == measured:
        return "✓ equal"
    if not predicted:
        return "✗ not equal"
    return f"✗ {heading} is {measured / predicted:.3g} × the prediction"
