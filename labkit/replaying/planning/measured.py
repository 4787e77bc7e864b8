"""Step times that others have measured on A100s, as rows that `step_report` can be asked for.

Megatron-DeepSpeed, mixed precision, 1F1B, attention that stores its scores, every block recomputed.
A vocabulary of 51,200 is assumed: the tables do not say. Source: vTrain, arXiv 2312.12391 (MIT
licence), ground truth; see tables/README.md.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit.replaying.planning.layout import Layout, Sizes

PUBLISHED = Path(__file__).with_name("tables")
FILES = ("a100_step_times_node.csv", "a100_step_times_cluster.csv")
COUNTS = (
    "gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "sequence",
    "tp", "dp", "pp",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measured step."""

    file: str
    sizes: Sizes
    layout: Layout
    global_batch: int
    step_s: float

    @property
    def model(self) -> str:
        """What is left out together: the models of one width."""
        return f"width {self.sizes.width}"

    @property
    def in_words(self) -> str:
        return f"{self.model}, {self.sizes.depth} blocks, {self.layout.in_words}"


@dataclass(frozen=True)
class Reduced:
    """One measured all-reduce inside a node."""

    ranks: int
    nbytes: int
    seconds: float


def step_rows(folder: str | Path = PUBLISHED) -> list[Row]:
    """Of both tables. Raises FileNotFoundError, or ValueError that names the line."""
    return [_row(name, *one) for name in FILES for one in _lines(Path(folder) / name)]


def all_reduces(folder: str | Path = PUBLISHED) -> list[Reduced]:
    found = []
    for where, line in _lines(Path(folder) / "a100_allreduce.csv"):
        ranks, nbytes = (_count(line, name, where) for name in ("gpus", "bytes"))
        found.append(Reduced(ranks, nbytes, _positive(line, "time_ns", where) * 1e-9))
    return found


def _lines(path: Path) -> list[tuple[str, Mapping[str, str]]]:
    """Each with how errors call it."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there; give the folder that has {', '.join(FILES)} and "
            "a100_allreduce.csv, or none for labkit's own copies"
        )
    with path.open(encoding="utf-8", newline="") as file:
        return [(f"{path.name}, line {i}", one) for i, one in enumerate(csv.DictReader(file), 2)]


def _row(file: str, where: str, line: Mapping[str, str]) -> Row:
    (gpus, batch, microbatch, width, heads, depth, context, tp, dp, pp) = (
        _count(line, name, where) for name in COUNTS
    )
    layout = Layout(tp=tp, pp=pp, dp=dp, microbatch=microbatch, recompute="full")
    if layout.ranks != gpus:
        raise ValueError(
            f"{where}: tp x pp x dp is {layout.ranks}, and gpus {gpus}; make them equal"
        )
    if batch % (dp * microbatch):
        raise ValueError(
            f"{where}: a batch of {batch} rows does not divide over dp {dp} and micro-batches of "
            f"{microbatch}"
        )
    sizes = Sizes(width, depth, heads, context)
    return Row(file, sizes, layout, batch, _positive(line, "step_ms", where) * 1e-3)


def _count(line: Mapping[str, str], name: str, where: str) -> int:
    number = _positive(line, name, where)
    if number != int(number):
        raise ValueError(f"{where}: {name} = {line[name]!r}; a whole number is needed")
    return int(number)


def _positive(line: Mapping[str, str], name: str, where: str) -> float:
    told = line.get(name)
    try:
        number = float(told or "")
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{where}: {name} = {told!r}; a number above 0 is needed")
    return number
