"""Predictions: `guess = predict(sent_bytes=3 * 4096)` before a run,
`guess.beside(sent_bytes=measured)` after it.
"""

from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from labkit.course.findings import CheckFailed, brief, kind
from labkit.predict.tables import Number, Table, in_full, label


def predict(*unnamed: Any, **numbers: Any) -> "Prediction":
    """Record predictions by name, with the unit in the name; `predict()` records none. Raises
    CheckFailed for a prediction that is still `...`, has no name or is not a number."""
    if unnamed:
        raise CheckFailed(
            f"a prediction has no name: {', '.join(map(brief, unnamed))}.",
            hint="Name each prediction, as in predict(sent_bytes=4096).",
        )
    for name, value in numbers.items():
        if isinstance(value, EllipsisType):
            raise CheckFailed(
                f"{name} is not predicted yet.",
                hint="Replace the ... with a number or a formula. A wrong guess costs nothing.",
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckFailed(f"{name} is {kind(value)}, but a number is expected.")
    return Prediction(Numbers(numbers))


class Numbers(dict[str, Number]):
    """Predicted numbers by name; a missing name raises CheckFailed with a hint."""

    def __missing__(self, name: str) -> Number:  # after `predict()`; replaces a KeyError
        raise CheckFailed(
            "nothing is predicted yet.",
            hint="Fill in your prediction in section 3 first, and run its cell.",
        )


@dataclass(frozen=True)
class Prediction:
    """The numbers that a student has predicted."""

    numbers: dict[str, Number]

    def __repr__(self) -> str:
        return "predicted: " + ", ".join(
            f"{label(n)} = {in_full(v)}" for n, v in self.numbers.items()
        )

    def beside(self, heading: str = "measured", /, **measured: Number) -> Table:
        """A table of the predictions next to `measured` values, in a column named `heading`."""
        if not self.numbers:
            self.numbers["it"]
        if measured.keys() != self.numbers.keys():
            raise ValueError(
                f"beside({', '.join(measured)}): the predictions are {', '.join(self.numbers)}; "
                "use the same names"
            )
        return Table(
            ("", "predicted", heading, ""),
            [
                (label(n), in_full(p), in_full(measured[n]), _verdict(p, measured[n], heading))
                for n, p in self.numbers.items()
            ],
        )


def _verdict(predicted: Number, measured: Number, heading: str) -> str:
    if predicted == measured:
        return "✓ equal"
    if not predicted:
        return "✗ not equal"
    return f"✗ {heading} is {measured / predicted:.3g} × the prediction"
