"""The constants of the A100, fitted to published step times.

    225 measured steps ──▶ fit ──▶ 4 constants; those of the device are entered in known.toml:
          ▲                 │      devices.a100-fitted
          └── step_report ◀─┘

    matmul_reached   part of the peak rate that large matrix products run at
    memory_reached   part of the memory's bandwidth that element-wise operations run at
    host_s           the host's time to launch an operation (seconds.py)
    microbatch_s     the host's time around each micro-batch: of their program, and not entered

Two more are fitted to NCCL's all-reduces inside one node, without any step: `inside_start_s` and
`inside_reached`. Everything else is in known.toml with its source.

Intervals: the rows are resampled a thousand times, in whole groups (a width, a tp and a
micro-batch: their errors are correlated), and the constants fitted again; a row's interval adds the
spread of the residuals. Generalisation: the models of one width are left out, the rest fitted
again, and the error on those left out reported; and so for each layout.

Rows are computed as Megatron-DeepSpeed computed them, where labkit differs: attention stores its
scores; Adam is one kernel; gradients are sent as fp32, after the last backward.

Tried, with larger errors on models left out, or no smaller ones: a host that runs ahead over a
whole step; separate constants for the wires between nodes, for the shortest operation on the
device, for tiles of matrix products, for a vocabulary that tensor cores do not like; gradients of
two bytes; Megatron's fused softmax, its dropout.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track
from rich.table import Table

from labkit.cli.terminal import console, print_table
from labkit.clusters import Cluster, Level, cluster
from labkit.comm.collectives.costs import cost
from labkit.replaying.costs import Costs
from labkit.replaying.planning.published import SECONDS, Array, Calibration, Row, calibration
from labkit.replaying.planning.stages import slowest
from labkit.replaying.planning.step_model import StepModel
from robust_fit import Bounds, Fit, fit, refit
from step_times import TABLES, count_in, positive_in, read_lines, step_rows

CLUSTER = "a100-fitted"
OF_DEVICE = ("matmul_reached", "memory_reached", "host_s")
NAMES = (*OF_DEVICE, "microbatch_s")
BOUNDS = Bounds(
    assumed=np.array([0.75, 0.75, 30e-6, 2e-3]),
    least=np.array([0.1, 0.1, 1e-6, 1e-6]),
    most=np.array([1.0, 1.0, 1e-3, 0.1]),
)
ADAM_BYTES = 40  # for each parameter: fp32 copy of the gradient, four elements read, three written
GRADIENT_BYTES = 4
WIRES = ("inside_start_s", "inside_reached")
DRAWS, PART = 1000, 0.9  # of the intervals
SEED, DIGITS = 0, 3


def with_constants(where: Cluster, constants: Array) -> Cluster:
    """`where`, with these constants (in the order of NAMES) for its device."""
    named: dict[str, Any] = dict(zip(OF_DEVICE, map(float, constants)))
    return replace(where, device=replace(where.device, **named))


def seconds_of(rows: Sequence[Row], where: Cluster, microbatch_s: float) -> Array:
    """The predicted seconds of these rows, with their program's time around micro-batches."""
    costs = Costs(where)
    return np.array([step_seconds(row, costs) + rounds(row) * microbatch_s for row in rows])


def rounds(row: Row) -> int:
    """Micro-batches that a host handles one after the other: its own, and the pipeline's fill."""
    return row.layout.microbatches(row.global_batch) + row.layout.pp - 1


def step_seconds(row: Row, costs: Costs) -> float:
    """Micro-batches as in `step_report`, then their end of a step: all gradients at once, in fp32,
    and one kernel of Adam."""
    model = StepModel(row.sizes, row.layout, row.global_batch, costs.cluster, costs, "plain")
    timing = model.timing()
    device = costs.cluster.device
    adam_s_per_element = ADAM_BYTES / (device.memory_bytes_per_s * device.memory_reached)
    ended = []
    for stage, chunks in enumerate(model.stages):
        elements = sum(chunk.parameters for chunk in chunks)
        data = slowest("all_reduce", GRADIENT_BYTES * elements, costs, model.groups("dp", stage))
        end_s = float(timing.ended_s[stage]) + data.seconds + data.latency_s
        ended.append(end_s + elements * adam_s_per_element)
    return max(ended)


def predictor(rows: Sequence[Row], where: Cluster) -> Callable[[Array], Array]:
    """A function from constants to the seconds of each row."""

    def predict(constants: Array) -> Array:
        return seconds_of(rows, with_constants(where, constants), float(constants[-1]))

    return predict


def calibrate(rows: Sequence[Row], where: Cluster | None = None) -> Calibration:
    """Fit the constants to these rows, on the cluster on which they were measured."""
    where = cluster(CLUSTER) if where is None else where
    for row in track(rows, "recording layers without data", transient=True):
        step_seconds(row, Costs(where))
    measured = np.array([row.step_s for row in rows])
    fitted = fit(predictor(rows, where), measured, BOUNDS)
    low, high, low_s, high_s = intervals(rows, fitted)
    rounded = np.array([float(f"{x:.{DIGITS}g}") for x in fitted.constants])
    constants = {
        name: (float(x), float(a), float(b)) for name, x, a, b in zip(NAMES, rounded, low, high)
    }
    predicted_s = seconds_of(rows, with_constants(where, rounded), float(rounded[-1]))
    return Calibration(
        constants, tuple(rows), predicted_s, low_s, high_s,
        without_each_model(rows, where, fitted), without_each_layout(rows, fitted),
    )  # fmt: skip


def without_each_model(rows: Sequence[Row], where: Cluster, fitted: Fit) -> Array:
    """Each row's seconds by constants that were fitted without the models of its width."""
    seconds = np.zeros(len(rows))
    for model in track(sorted({row.model for row in rows}), "leaving out", transient=True):
        kept = [row for row in rows if row.model != model]
        left_out = [i for i, row in enumerate(rows) if row.model == model]
        start = refit(fitted, np.array([row.model != model for row in rows], float))
        measured = np.array([row.step_s for row in kept])
        others = fit(predictor(kept, where), measured, BOUNDS, start, rounds=6)
        alone = with_constants(where, others.constants)
        seconds[left_out] = seconds_of(
            [rows[i] for i in left_out], alone, float(others.constants[-1])
        )
    return seconds


def without_each_layout(rows: Sequence[Row], fitted: Fit) -> Array:
    """Each row's seconds without the rows of its tp, pp and dp; by the slopes of the fit to all."""
    layouts = [(row.layout.tp, row.layout.pp, row.layout.dp) for row in rows]
    errors = np.zeros(len(rows))
    for layout in set(layouts):
        left_out = np.array([x == layout for x in layouts])
        moved = np.log(refit(fitted, (~left_out).astype(float)) / fitted.constants)
        errors[left_out] = (fitted.errors + fitted.slopes @ moved)[left_out]
    return np.array([row.step_s for row in rows]) * np.exp(errors)


def intervals(rows: Sequence[Row], fitted: Fit) -> tuple[Array, Array, Array, Array]:
    """Low and high ends for the constants, and for the seconds of each row."""
    rng = np.random.default_rng(SEED)
    kinds = [(row.model, row.layout.tp, row.layout.microbatch) for row in rows]
    group = np.array([sorted(set(kinds)).index(kind) for kind in kinds])
    groups = int(group.max()) + 1
    drawn, logs = [], []
    for _ in range(DRAWS):
        times = np.bincount(rng.integers(0, groups, groups), minlength=groups)
        drawn.append(refit(fitted, times[group].astype(float)))
        moved = fitted.slopes @ np.log(drawn[-1] / fitted.constants)
        logs.append(fitted.errors + moved - rng.choice(fitted.errors, len(rows)))
    ends = (1 - PART) / 2, (1 + PART) / 2
    low, high = np.quantile(np.array(drawn), ends, axis=0)
    measured = np.array([row.step_s for row in rows])
    low_s, high_s = measured * np.exp(np.quantile(np.array(logs), ends, axis=0))
    return low, high, low_s, high_s


@dataclass(frozen=True)
class AllReduce:
    """One measured all-reduce inside a node."""

    ranks: int
    nbytes: int
    seconds: float


def all_reduces(folder: Path = TABLES) -> list[AllReduce]:
    """The published ones."""
    measured = []
    for place, line in read_lines(folder / "a100_allreduce.csv"):
        ranks, nbytes = (count_in(line, name, place) for name in ("gpus", "bytes"))
        measured.append(AllReduce(ranks, nbytes, positive_in(line, "time_ns", place) * 1e-9))
    return measured


def wires_inside(measured: Sequence[AllReduce], level: Level) -> dict[str, float]:
    """Start and reached part of a level, from ring all-reduces inside a node:
    seconds = start + steps x latency + bytes sent / (bandwidth x reached)."""
    steps = np.array([cost("all_reduce", "ring", x.ranks, 0).steps for x in measured])
    sent = np.array([2 * (x.ranks - 1) / x.ranks * x.nbytes for x in measured])
    seconds = np.array([x.seconds for x in measured])

    def predict(constants: Array) -> Array:
        start_s, reached = constants
        return start_s + steps * level.latency_s + sent / (level.bytes_per_s * reached)

    bounds = Bounds(np.array([30e-6, 0.75]), np.array([1e-6, 0.1]), np.array([1e-3, 1.0]))
    return dict(zip(WIRES, map(float, fit(predict, seconds, bounds).constants)))


def tables(fitted: Calibration, folder: Path) -> tuple[Table, Table]:
    """Constants with their intervals, and all errors."""
    constants = Table("constant", "fitted", "90 % interval", title="Constants of the A100")
    for name, (value, low, high) in fitted.constants.items():
        constants.add_row(name, f"{value:.3g}", f"{low:.3g} to {high:.3g}")
    for name, value in wires_inside(all_reduces(folder), cluster(CLUSTER).inside).items():
        constants.add_row(name, f"{value:.3g}", "NCCL's all-reduces")
    errors = Table("steps", "rows", "mean absolute error", "median", title="Errors")
    for name, (rows, mean, median) in fitted.summary().items():
        errors.add_row(name, str(rows), f"{mean:.1%}", f"{median:.1%}")
    return constants, errors


def toml_lines(fitted: Calibration, day: str) -> str:
    """The lines for known.toml."""
    return "\n".join(
        f'{name} = [{x:g}, "fitted to {len(fitted.rows)} step times (vTrain) on {day}: '
        f'{low:.{DIGITS}g} to {high:.{DIGITS}g}; tests/benchmarks/calibrate.py"]'
        for name, (x, low, high) in fitted.constants.items()
        if name in OF_DEVICE
    )


def save_calibration(fitted: Calibration, path: str | Path) -> Path:
    """Write it as JSON, with today's date; a line for each row, in the order of the tables."""
    about = {
        "source": "tests/benchmarks/calibrate.py",
        "date": fitted.dated or str(date.today()),
        "constants": fitted.constants,
    }
    rows = [
        asdict(row) | {name: float(f"{getattr(fitted, name)[i]:.6g}") for name in SECONDS}
        for i, row in enumerate(fitted.rows)
    ]
    head = json.dumps(about, indent=1).removesuffix("\n}")
    lines = ",\n".join(json.dumps(row) for row in rows)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "rows": [\n{lines}\n]\n}}\n', encoding="utf-8")
    return path


def main(
    folder: Annotated[Path, typer.Argument(help="Of the published tables.")] = TABLES,
    save: Annotated[Path | None, typer.Option(help="Write the fit as JSON.")] = None,
    stored: Annotated[bool, typer.Option(help="Show labkit's own fit; fit nothing.")] = False,
) -> None:
    """Fit the A100's constants to published step times, and report every error. Minutes."""
    fitted = calibration() if stored else calibrate(step_rows(folder))
    for shown in tables(fitted, folder):
        print_table(shown)
    console.print("\nFor labkit/clusters/known.toml:")
    console.print(
        toml_lines(fitted, fitted.dated or str(date.today())), markup=False, soft_wrap=True
    )
    if save is not None:
        console.print(f"Saved: {save_calibration(fitted, save)}")


if __name__ == "__main__":
    typer.run(main)
