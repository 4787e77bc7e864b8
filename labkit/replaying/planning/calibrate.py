"""The constants of the A100, fitted once to step times that others have measured.

    225 measured steps ──▶ fit ──▶ 4 constants; those of the device are frozen in known.toml:
          ▲                 │      devices.a100-fitted
          └── step_report ◀─┘

    matmul_reached   part of the peak rate that large matrix products run at
    memory_reached   part of the memory's bandwidth that element-wise operations run at
    host_s           what the host takes to launch an operation (seconds.py)
    microbatch_s     what the host does around each micro-batch: of their program, and not frozen

Two more are fitted to NCCL's all-reduces inside one node, without any step: `inside_start_s` and
`inside_reached`. What is not fitted stands in known.toml with its source.

How sure: the rows are drawn anew, a thousand times, in whole groups (a width, a tp and a
micro-batch: their errors go together), and the constants found again; a row's interval has the
spread of what is left besides. How far it carries: the models of one width are left out, the rest
fitted anew, and the error on those left out is told; and so for each layout.

Rows are computed as Megatron-DeepSpeed computed them, where labkit does otherwise: attention stores
its scores; Adam is one kernel; gradients travel as fp32, after the last backward.

What was tried, and told models that were left out worse, or no better: a host that runs ahead over
a whole step; constants of their own for the wires between nodes, for what an operation takes at
least on the device, for tiles of matrix products, for a vocabulary that tensor cores do not like;
gradients of two bytes; Megatron's fused softmax, its dropout.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.progress import track

from labkit.clusters import Cluster, Level, cluster
from labkit.comm.collectives.costs import cost
from labkit.replaying.costs import Costs
from labkit.replaying.planning.calibrated import Calibration
from labkit.replaying.planning.clock import Timing, pipeline_timing
from labkit.replaying.planning.fitting import Array, Bounds, Fit, fit, fit_again
from labkit.replaying.planning.measured import Reduced, Row
from labkit.replaying.planning.placement import data_groups, slowest
from labkit.replaying.planning.steps import Planned, plan_step

CLUSTER = "a100-fitted"
OF_DEVICE = ("matmul_reached", "memory_reached", "host_s")
NAMES = (*OF_DEVICE, "microbatch_s")
BOUNDS = Bounds(
    assumed=np.array([0.75, 0.75, 30e-6, 2e-3]),
    least=np.array([0.1, 0.1, 1e-6, 1e-6]),
    most=np.array([1.0, 1.0, 1e-3, 0.1]),
)
ADAM_BYTES = 40  # of each parameter: fp32 copy of the gradient, four numbers read, three written
GRADIENT_BYTES = 4
WIRES = ("inside_start_s", "inside_reached")
DRAWS, PART = 1000, 0.9  # of the intervals: nine in ten
SEED, DIGITS = 0, 3


def with_constants(where: Cluster, constants: Array) -> Cluster:
    """`where`, with these (in the order of NAMES) in place of its own."""
    told = dict(zip(NAMES, map(float, constants)))
    of_device: dict[str, Any] = {name: told[name] for name in OF_DEVICE}
    return replace(where, device=replace(where.device, **of_device))


def seconds_of(rows: Sequence[Row], where: Cluster, microbatch_s: float) -> Array:
    """What labkit says of these rows, and what their program does around micro-batches."""
    costs = Costs(where)
    return np.array([step_seconds(row, costs) + rounds(row) * microbatch_s for row in rows])


def rounds(row: Row) -> int:
    """Micro-batches that a host sees, one after the other: its own, and the pipeline's filling."""
    return row.layout.microbatches(row.global_batch) + row.layout.pp - 1


def step_seconds(row: Row, costs: Costs) -> float:
    """Micro-batches as `step_report` has them, then the end of a step as theirs: all gradients at
    once, in fp32, and one kernel of Adam."""
    planned, timing = _through(row, costs)
    device, per_node = costs.cluster.device, costs.cluster.devices_per_node
    adam_s_per_element = ADAM_BYTES / (device.memory_bytes_per_s * device.memory_reached)
    ended = []
    for stage, its in enumerate(planned.stages):
        elements = sum(chunk.parameters for chunk in its)
        groups = data_groups(row.layout, stage, per_node)
        data = slowest("all_reduce", GRADIENT_BYTES * elements, costs, groups)
        end_s = float(timing.ended_s[stage]) + data.seconds + data.latency_s
        ended.append(end_s + elements * adam_s_per_element)
    return max(ended)


def _through(row: Row, costs: Costs) -> tuple[Planned, Timing]:
    """All micro-batches, forward and backward."""
    planned = plan_step(row.sizes, row.layout, row.global_batch, costs.cluster, costs, "plain")
    forward_s, backward_s = (
        np.array([[getattr(one, name) for one in its] for its in planned.chunks])
        for name in ("forward_s", "backward_s")
    )
    messages_s = np.array(planned.messages_s)
    return planned, pipeline_timing(planned.microbatches, forward_s, backward_s, messages_s)


def predictor(rows: Sequence[Row], where: Cluster) -> Callable[[Array], Array]:
    """Constants -> seconds of each row."""

    def predict(constants: Array) -> Array:
        return seconds_of(rows, with_constants(where, constants), float(constants[-1]))

    return predict


def calibrate(rows: Sequence[Row], where: Cluster | None = None) -> Calibration:
    """Fit the constants to these rows, on the cluster on which they were measured."""
    where = cluster(CLUSTER) if where is None else where
    for row in track(rows, "recording layers without data", transient=True):
        step_seconds(row, Costs(where))
    measured = np.array([row.step_s for row in rows])
    found = fit(predictor(rows, where), measured, BOUNDS)
    low, high, low_s, high_s = intervals(rows, found)
    frozen = np.array([float(f"{x:.{DIGITS}g}") for x in found.constants])
    constants = {
        name: (float(x), float(a), float(b)) for name, x, a, b in zip(NAMES, frozen, low, high)
    }
    told_s = seconds_of(rows, with_constants(where, frozen), float(frozen[-1]))
    return Calibration(
        constants, tuple(rows), told_s, low_s, high_s,
        without_each_model(rows, where, found), without_each_layout(rows, found),
    )  # fmt: skip


def toml_lines(found: Calibration, day: str) -> str:
    """For known.toml."""
    return "\n".join(
        f'{name} = [{x:g}, "fitted to {len(found.rows)} step times (vTrain) on {day}: '
        f'{low:.{DIGITS}g} to {high:.{DIGITS}g}; labkit bench calibrate"]'
        for name, (x, low, high) in found.constants.items()
        if name != "microbatch_s"  # of their program
    )


def without_each_model(rows: Sequence[Row], where: Cluster, found: Fit) -> Array:
    """Each row's seconds by constants that were fitted without the models of its width."""
    seconds = np.zeros(len(rows))
    for model in track(sorted({row.model for row in rows}), "leaving out", transient=True):
        inside = [row for row in rows if row.model != model]
        outside = [i for i, row in enumerate(rows) if row.model == model]
        start = fit_again(found, np.array([row.model != model for row in rows], float))
        measured = np.array([row.step_s for row in inside])
        others = fit(predictor(inside, where), measured, BOUNDS, start, rounds=6)
        alone = with_constants(where, others.constants)
        seconds[outside] = seconds_of(
            [rows[i] for i in outside], alone, float(others.constants[-1])
        )
    return seconds


def without_each_layout(rows: Sequence[Row], found: Fit) -> Array:
    """Likewise without the rows of its tp, pp and dp; by the slopes of the fit to all."""
    layouts = [(row.layout.tp, row.layout.pp, row.layout.dp) for row in rows]
    errors = np.zeros(len(rows))
    for layout in set(layouts):
        out = np.array([one == layout for one in layouts])
        moved = np.log(fit_again(found, (~out).astype(float)) / found.constants)
        errors[out] = (found.errors + found.slopes @ moved)[out]
    return np.array([row.step_s for row in rows]) * np.exp(errors)


def intervals(rows: Sequence[Row], found: Fit) -> tuple[Array, Array, Array, Array]:
    """Ends for the constants, and for the seconds of each row."""
    rng = np.random.default_rng(SEED)
    kinds = [(row.model, row.layout.tp, row.layout.microbatch) for row in rows]
    group = np.array([sorted(set(kinds)).index(kind) for kind in kinds])
    groups = int(group.max()) + 1
    drawn, logs = [], []
    for _ in range(DRAWS):
        times = np.bincount(rng.integers(0, groups, groups), minlength=groups)
        drawn.append(fit_again(found, times[group].astype(float)))
        moved = found.slopes @ np.log(drawn[-1] / found.constants)
        logs.append(found.errors + moved - rng.choice(found.errors, len(rows)))
    ends = (1 - PART) / 2, (1 + PART) / 2
    low, high = np.quantile(np.array(drawn), ends, axis=0)
    measured = np.array([row.step_s for row in rows])
    low_s, high_s = measured * np.exp(np.quantile(np.array(logs), ends, axis=0))
    return low, high, low_s, high_s


def wires_inside(measured: Sequence[Reduced], level: Level) -> dict[str, float]:
    """Start and reached part of a level, from all-reduces by a ring inside a node:
    seconds = start + steps x latency + bytes sent / (bandwidth x reached)."""
    steps = np.array([cost("all_reduce", "ring", one.ranks, 0).steps for one in measured])
    sent = np.array([2 * (one.ranks - 1) / one.ranks * one.nbytes for one in measured])
    seconds = np.array([one.seconds for one in measured])

    def predict(constants: Array) -> Array:
        start_s, reached = constants
        return start_s + steps * level.latency_s + sent / (level.bytes_per_s * reached)

    bounds = Bounds(np.array([30e-6, 0.75]), np.array([1e-6, 0.1]), np.array([1e-3, 1.0]))
    return dict(zip(WIRES, map(float, fit(predict, seconds, bounds).constants)))
