"""What a calibration found, in a file: constants, and every row measured beside predicted.

`calibration()` reads the one that labkit brings along; `plot.calibration(calibration())` draws it,
`labkit bench calibrate` makes it anew.
"""

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from labkit.foreign import write_json
from labkit.replaying.planning.fitting import Array
from labkit.replaying.planning.measured import PUBLISHED, Row, step_rows

STORED = PUBLISHED / "calibration.json"
SECONDS = ("predicted_s", "low_s", "high_s", "without_model_s", "without_layout_s")


@dataclass(frozen=True)
class Calibration:
    """Constants by name, each with the ends of its interval; seconds of each row, likewise; and
    what each row was told by constants fitted without the models of its width, and without its
    layout. Intervals hold nine in ten."""

    constants: dict[str, tuple[float, float, float]]
    rows: tuple[Row, ...]
    predicted_s: Array
    low_s: Array
    high_s: Array
    without_model_s: Array
    without_layout_s: Array
    dated: str = ""

    @property
    def measured_s(self) -> Array:
        return np.array([row.step_s for row in self.rows])

    def errors(self, predicted_s: Array | None = None) -> Array:
        """Of each row, as a part of what was measured, with its sign: fitted to all rows, or of
        other seconds."""
        found = self.predicted_s if predicted_s is None else predicted_s
        return found / self.measured_s - 1

    def summary(self) -> dict[str, tuple[int, float, float]]:
        """Rows, mean absolute error and median of it: of all, by table, by width, left out."""
        off, rows = np.abs(self.errors()), self.rows
        parts: dict[str, Array] = {"all rows": off}
        for name in dict.fromkeys(row.file for row in rows):
            parts[name.removesuffix(".csv")] = off[[row.file == name for row in rows]]
        without = np.abs(self.errors(self.without_model_s))
        for model in dict.fromkeys(row.model for row in sorted(rows, key=lambda x: x.sizes.width)):
            here = [row.model == model for row in rows]
            parts[model] = off[here]
            parts[f"{model}, fitted to the others"] = without[here]
        parts["each width, fitted to the others"] = without
        layouts = np.abs(self.errors(self.without_layout_s))
        parts["each layout, fitted to the others"] = layouts
        return {name: (len(x), float(x.mean()), float(np.median(x))) for name, x in parts.items()}


def save_calibration(found: Calibration, path: str | Path) -> Path:
    """As JSON, with the date of today. Rows stand as in labkit's tables, in their order."""
    told: dict[str, Any] = {
        "source": "labkit bench calibrate", "date": found.dated or str(date.today()),
        "constants": {name: list(x) for name, x in found.constants.items()},
        "rows": [
            {"row": row.in_words, "measured_s": row.step_s}
            | {name: float(f"{getattr(found, name)[i]:.6g}") for name in SECONDS}
            for i, row in enumerate(found.rows)
        ],
    }  # fmt: skip
    return write_json(path, told)


def calibration(path: str | Path = STORED) -> Calibration:
    """The stored one. Raises ValueError where it is not of the rows that are stored beside it."""
    told = json.loads(Path(path).read_text(encoding="utf-8"))
    rows = step_rows()
    if [x["row"] for x in told["rows"]] != [row.in_words for row in rows]:
        raise ValueError(f"{path} is of other rows than {PUBLISHED}; labkit bench calibrate")
    seconds = {name: np.array([x[name] for x in told["rows"]]) for name in SECONDS}
    constants = {name: (x[0], x[1], x[2]) for name, x in told["constants"].items()}
    return Calibration(constants, tuple(rows), **seconds, dated=told["date"])
