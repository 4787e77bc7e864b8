"""Published figures: GPTs trained at scale, and measured step times on A100s.

`MEGATRON` is Table 1 of arXiv 2104.04473 (Narayanan et al., Megatron-LM): 1.7B to 1008B parameters
on 32 to 3,072 A100s of Selene, vocabulary 51,200, sequences of 2,048, full recomputation. As in the
paper (equation 3), FLOP/s include recomputation.

The step times are the ground truth of vTrain, arXiv 2312.12391 (MIT license): Megatron-DeepSpeed,
mixed precision, 1F1B, attention that stores its scores, full recomputation, and an assumed
vocabulary of 51,200. calibration.json lists each step time with labkit's prediction. The 3.6B
model with micro-batches of 64 on tp 8, dp 8 took twice as long as with 32: this time looks like an
outlier, but is included in every error that labkit reports.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from labkit.replaying.planning.layout import Layout, Sizes

STORED = Path(__file__).with_name("calibration.json")
SECONDS = ("predicted_s", "low_s", "high_s", "without_model_s", "without_layout_s")

Array = np.ndarray[Any, np.dtype[np.float64]]


# ---- the models


@dataclass(frozen=True)
class Trained:
    """A row of Table 1, completed by our choice of `microbatch` and plain 1F1B."""

    billions: float  # billions of parameters
    heads: int
    width: int
    depth: int
    tp: int
    pp: int
    ranks: int
    batch: int  # rows per step
    tflops: float  # achieved per GPU
    microbatch: int

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.width, self.depth, self.heads)

    @property
    def layout(self) -> Layout:
        dp = self.ranks // (self.tp * self.pp)
        return Layout(self.tp, self.pp, dp, self.microbatch, recompute="full")


MEGATRON = (
    Trained(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, microbatch=8),
    Trained(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, microbatch=8),
    Trained(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, microbatch=4),
    Trained(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, microbatch=4),
    Trained(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, microbatch=2),
    Trained(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, microbatch=2),
    Trained(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, microbatch=2),
    Trained(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, microbatch=1),
    Trained(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, microbatch=1),
    Trained(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, microbatch=1),
)

GPT3 = Sizes(width=12288, depth=96, heads=96)  # arXiv 2005.14165, table 2.1; vocabulary padded
MODELS: dict[str, Sizes] = {  # for `labkit plan --model`
    **{f"megatron-{row.billions:g}b": row.sizes for row in MEGATRON},
    "gpt3-175b": GPT3,
}


def model(name: str) -> Sizes:
    """A model's sizes by name. Raises ValueError (listing the names) if none matches."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; choose one of {', '.join(MODELS)}")
    return MODELS[name]


# ---- the step times


@dataclass(frozen=True)
class Row:
    """A published step time: source table, model sizes, layout, rows per step, seconds."""

    file: str
    sizes: Sizes
    layout: Layout
    global_batch: int
    step_s: float

    @property
    def model(self) -> str:
        """A label by width: a held-out fit excludes all models of the same width."""
        return f"width {self.sizes.width}"

    @property
    def in_words(self) -> str:
        return f"{self.model}, {self.sizes.depth} blocks, {self.layout.in_words}"


# ---- the fit


@dataclass(frozen=True)
class Calibration:
    """Fitted constants and predicted seconds per row, each with a 90 % interval, and predictions
    from fits that exclude all models of a row's width, or the row's layout."""

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
        """Signed relative error per row, of `predicted_s` (by default, of the fit to all rows)."""
        return (self.predicted_s if predicted_s is None else predicted_s) / self.measured_s - 1

    def summary(self) -> dict[str, tuple[int, float, float]]:
        """Row count, mean and median |relative error|: overall, per table, per width, held out."""
        off, rows = np.abs(self.errors()), self.rows
        parts: dict[str, Array] = {"all rows": off}
        for name in dict.fromkeys(row.file for row in rows):
            parts[name.removesuffix(".csv")] = off[[row.file == name for row in rows]]
        without = np.abs(self.errors(self.without_model_s))
        for model in dict.fromkeys(row.model for row in sorted(rows, key=lambda x: x.sizes.width)):
            selected = [row.model == model for row in rows]
            parts[model] = off[selected]
            parts[f"{model}, fitted to the others"] = without[selected]
        parts["each width, fitted to the others"] = without
        parts["each layout, fitted to the others"] = np.abs(self.errors(self.without_layout_s))
        return {name: (len(x), float(x.mean()), float(np.median(x))) for name, x in parts.items()}


def calibration(path: str | Path = STORED) -> Calibration:
    """Load the stored fit. `tests/benchmarks/calibrate.py` recomputes it."""
    contents = json.loads(Path(path).read_text(encoding="utf-8"))
    rows = [
        Row(x["file"], Sizes(**x["sizes"]), Layout(**x["layout"]), x["global_batch"], x["step_s"])
        for x in contents["rows"]
    ]
    seconds = {name: np.array([x[name] for x in contents["rows"]]) for name in SECONDS}
    constants = {name: (x[0], x[1], x[2]) for name, x in contents["constants"].items()}
    return Calibration(constants, tuple(rows), **seconds, dated=contents["date"])
