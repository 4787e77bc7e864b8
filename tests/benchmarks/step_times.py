"""The published step times (tests/data/published), read from their tables.

Megatron-DeepSpeed, mixed precision, 1F1B, attention that stores its scores, every block recomputed.
A vocabulary of 51,200 is assumed: the tables do not say. Source: vTrain, arXiv 2312.12391.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.published import Row

TABLES = Path(__file__).resolve().parents[1] / "data" / "published"
FILES = ("a100_step_times_node.csv", "a100_step_times_cluster.csv")
COUNTS = (
    "gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "sequence",
    "tp", "dp", "pp",
)  # fmt: skip


def step_rows(folder: str | Path = TABLES) -> list[Row]:
    """The rows of both tables. Raises FileNotFoundError, or ValueError that names the line."""
    rows = []
    for file in FILES:
        for place, line in read_lines(Path(folder) / file):
            (gpus, batch, microbatch, width, heads, depth, context, tp, dp, pp) = (
                count_in(line, name, place) for name in COUNTS
            )
            layout = Layout(tp=tp, pp=pp, dp=dp, microbatch=microbatch, recompute="full")
            if layout.ranks != gpus:
                raise ValueError(
                    f"{place}: tp x pp x dp is {layout.ranks}, and gpus {gpus}; make them equal"
                )
            if batch % (dp * microbatch):
                raise ValueError(
                    f"{place}: a batch of {batch} rows does not divide over dp {dp} and "
                    f"micro-batches of {microbatch}"
                )
            step_s = positive_in(line, "step_ms", place) * 1e-3
            rows.append(Row(file, Sizes(width, depth, heads, context), layout, batch, step_s))
    return rows


def read_lines(path: Path) -> list[tuple[str, Mapping[str, str]]]:
    """The lines of a CSV table, each behind its place for error messages."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; name the folder that has {', '.join(FILES)}")
    with path.open(encoding="utf-8", newline="") as file:
        return [(f"{path.name}, line {i}", line) for i, line in enumerate(csv.DictReader(file), 2)]


def count_in(line: Mapping[str, str], name: str, place: str) -> int:
    """A whole number above 0."""
    number = positive_in(line, name, place)
    if number != int(number):
        raise ValueError(f"{place}: {name} = {line[name]!r}; a whole number is needed")
    return int(number)


def positive_in(line: Mapping[str, str], name: str, place: str) -> float:
    """A number above 0. Raises ValueError for anything else."""
    text = line.get(name)
    try:
        number = float(text or "")
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{place}: {name} = {text!r}; a number above 0 is needed")
    return number
