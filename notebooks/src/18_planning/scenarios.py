"""Cases for lab 18's checks; the correct results are computed by `labkit.predict` or by replay.

A case is a model with a layout. Most sizes (heads, blocks, rows, ranks) have a factor of 3 or 5, so
that a formula that swaps two axes fails.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from labkit.clusters import Cluster, cluster
from labkit.predict import (
    MIXED_ADAM,
    activation_bytes,
    interleaved,
    mfu,
    model_state_bytes,
    step_flops,
)
from labkit.replaying.pipeline import pipeline_step_s, pipeline_trace
from labkit.replaying.planning.layout import Layout, Sizes, described, layouts
from labkit.replaying.planning.report import StepReport
from labkit.replaying.planning.steps import step_report
from labkit.schedules import schedule

GPT3 = Sizes(width=12288, depth=96, heads=96)
SMALL = Sizes(width=1920, depth=30, heads=24, context=1536)


class Case(NamedTuple):
    """A model, a layout, and the rows per step."""

    sizes: Sizes
    layout: Layout
    global_batch: int

    def __str__(self) -> str:
        model = f"{self.sizes.depth} blocks of width {self.sizes.width}"
        return f"{model}, {described(self.layout)}, {self.global_batch} rows"

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.global_batch)


CASES = (
    Case(GPT3, Layout(tp=8, pp=8, dp=16), 1536),
    Case(GPT3, Layout(tp=8, pp=8, dp=16, zero=1, microbatch=2), 1536),
    Case(SMALL, Layout(tp=2, pp=5, dp=3, zero=1, recompute="full"), 36),
    Case(SMALL, Layout(tp=1, pp=1, dp=8, microbatch=2), 48),
    Case(SMALL, Layout(tp=3, pp=10, dp=1, microbatch=4, sequence=True), 20),  # 5 micro-batches
    Case(SMALL, Layout(tp=4, pp=5, dp=2, chunks=3, recompute="full"), 40),
    Case(GPT3, Layout(tp=8, pp=12, dp=2, chunks=2, sequence=True), 96),
)


# ---- memory


def layer_bytes(sizes: Sizes, layout: Layout) -> float:
    """Bytes that a layer keeps for one micro-batch on one rank, excluding the attention scores,
    which fused attention never stores (lab 11)."""
    return activation_bytes(
        sizes.context, layout.microbatch, sizes.width, sizes.heads, layout.tp, layout.sequence,
        "full" if layout.recompute == "full" else "selective",
    )  # fmt: skip


def in_flight(layout: Layout, global_batch: int) -> float:
    """The peak number of micro-batches that the first stage holds."""
    count = layout.microbatches(global_batch)
    return interleaved(layout.pp, count, 1, 2, layout.chunks).peak_microbatches


def right_bytes(case: Case) -> dict[str, float]:
    """Bytes per rank of the first stage, by category."""
    sizes, layout, _ = case
    blocks = sizes.depth // layout.pp
    parameters = (12 * sizes.width**2 * blocks + sizes.vocab * sizes.width) / layout.tp
    state_bytes = model_state_bytes(parameters, layout.dp, layout.zero, MIXED_ADAM)
    replicated_bytes = parameters * (MIXED_ADAM.parameter + MIXED_ADAM.gradient)
    return {
        "parameters": parameters * MIXED_ADAM.parameter,
        "gradients": parameters * MIXED_ADAM.gradient,
        "optimizer state": state_bytes - replicated_bytes,
        "activations": layer_bytes(sizes, layout) * blocks * in_flight(layout, case.global_batch),
    }


# ---- time

FORWARD_S, TENSOR_S = 0.024, 0.004  # per micro-batch and stage: compute, waits for tp


def replayed_step_s(layout: Layout, global_batch: int, forward_s: float, tensor_s: float) -> float:
    """Seconds of a step by lab 16's replay; a chunk takes 1/chunks of a stage's time."""
    chunks = layout.chunks
    forward = forward_s + tensor_s
    backward = 2 * forward_s + tensor_s + (forward if layout.recompute == "full" else 0.0)
    costs = {"forward": forward / chunks, "backward": backward / chunks}
    count, name = layout.microbatches(global_batch), "1f1b" if chunks == 1 else "interleaved"
    return pipeline_step_s(pipeline_trace(schedule(name, layout.pp, count, chunks), costs))


def right_mfu_and_days(
    case: Case, step_s: float, peak_flops_per_s: float, tokens: float
) -> tuple[float, float]:
    """Model FLOPs utilization of a step, and the days to train on `tokens`."""
    sizes, layout, rows = case
    flops = step_flops(sizes.vocab, sizes.width, sizes.depth, sizes.heads, rows, sizes.context)
    steps = tokens / (rows * sizes.context)
    return mfu(flops, step_s, peak_flops_per_s, layout.ranks), steps * step_s / 86400


# ---- layouts that can run


class Candidate(NamedTuple):
    """A case, a number of GPUs, and the memory per GPU."""

    case: Case
    gpus: int
    budget_bytes: float

    def __str__(self) -> str:
        return f"{self.case}, on {self.gpus:,} GPUs of {self.budget_bytes / 1e9:g} GB"

    @property
    def arguments(self) -> tuple[Sizes, Layout, int, int, float, float]:
        sizes, layout, rows = self.case
        divides = sizes.heads % layout.tp == 0
        kept = layer_bytes(sizes, layout) if divides else 0.0
        return sizes, layout, self.gpus, rows, kept, self.budget_bytes


def candidates() -> list[Candidate]:
    """Layouts that can run, and layouts that break one or more rules."""
    of_96 = [
        Layout(tp=tp, pp=pp, dp=96 // (tp * pp), microbatch=b, chunks=v, zero=1)
        for tp in (1, 2, 3, 8, 12, 16)
        for pp in (1, 2, 3, 4, 5, 6)
        for b in (1, 4, 5)
        for v in (1, 2, 3)
        if tp * pp <= 96 and (v == 1 or pp > 1)
    ]
    cases = [Candidate(Case(SMALL, layout, 480), 96, 80e9) for layout in of_96]
    # Four micro-batches on six stages: a long bubble, but the layout runs.
    cases.append(Candidate(Case(SMALL, Layout(2, 6, 8, microbatch=15, zero=1), 480), 96, 80e9))
    interleaved_2 = Layout(tp=4, pp=2, dp=8, chunks=3)
    cases += [Candidate(Case(SMALL, interleaved_2, rows), 64, 80e9) for rows in (48, 40, 16)]
    for_gpt3 = [
        Layout(tp=tp, pp=pp, dp=1024 // (tp * pp), microbatch=b, zero=z, recompute=r)
        for tp in (4, 8, 16)
        for pp in (4, 8, 16)
        for b in (1, 2)
        for z in (0, 1)
        for r in ("none", "full")
    ]
    cases += [Candidate(Case(GPT3, layout, 1536), 1024, 80e9) for layout in for_gpt3]
    return cases


def why_invalid(candidate: Candidate) -> str:
    """Why the planner or the memory limit rules out the candidate; "" if it can run."""
    (sizes, layout, rows), gpus, budget_bytes = candidate
    try:
        layouts(
            sizes, gpus, rows, tp=layout.tp, pp=layout.pp, dp=layout.dp,
            microbatch=layout.microbatch, chunks=layout.chunks,
        )  # fmt: skip
    except ValueError as error:
        if not str(error).startswith("no layout"):  # the error names a size that is not divisible
            return str(error)
        m = layout.microbatches(rows)
        return (
            f"the sizes do not match: {layout.tp} x {layout.pp} x {layout.dp} ranks on {gpus} "
            f"GPUs, {sizes.heads} heads over tp {layout.tp}, {sizes.depth} blocks over {layout.pp} "
            f"stages of {layout.chunks} chunks, {rows} rows over {layout.dp} replicas with "
            f"micro-batches of {layout.microbatch}, {m} micro-batches for {layout.pp} stages"
        )
    held = sum(right_bytes(candidate.case).values())
    return f"it needs {held / 1e9:.1f} GB" if held > budget_bytes else ""


# ---- jobs to choose a layout for


class Job(NamedTuple):
    """A model to train on all devices of a cluster, with `global_batch` rows per step."""

    sizes: Sizes
    cluster: Cluster
    global_batch: int

    def __str__(self) -> str:
        device, between = self.cluster.device, self.cluster.between
        assert between is not None
        gbps = self.cluster.share_bytes_per_s(between) * 8 / 1e9
        return (
            f"{self.sizes.parameters / 1e9:.1f}B parameters ({self.sizes.depth} blocks of width "
            f"{self.sizes.width}, {self.sizes.heads} heads), {self.global_batch} rows, on "
            f"{self.cluster.size} GPUs of {device.memory_bytes / 1e9:.0f} GB; between nodes "
            f"{gbps:.3g} Gb/s per GPU"
        )

    def report(self, layout: Layout) -> StepReport:
        """The report of a replayed step."""
        return _replayed(self.sizes, layout, self.global_batch, self.cluster.name)


def _clusters() -> dict[str, Cluster]:
    selene = cluster("selene")
    assert selene.between is not None
    ethernet = replace(
        selene.between, name="Ethernet", ports=1, bytes_per_s=25e9 / 8, latency_s=30e-6
    )  # like the Ethernet of "v100-cloud"
    half_memory = replace(selene.device, memory_bytes=40e9)
    clusters = (
        replace(selene, name="12 nodes", nodes=12),
        replace(selene, name="8 nodes on Ethernet", nodes=8, between=ethernet),
        replace(selene, name="16 nodes of 40 GB", nodes=16, device=half_memory),
    )
    return {changed.name: changed for changed in clusters}


CLUSTERS = _clusters()
JOBS = {
    "an odd cluster": Job(Sizes(6144, 40, 48), CLUSTERS["12 nodes"], 768),
    "a slow network": Job(Sizes(4096, 36, 32), CLUSTERS["8 nodes on Ethernet"], 512),
    "half the memory": Job(Sizes(8192, 48, 64), CLUSTERS["16 nodes of 40 GB"], 512),
}
# Seconds per step with the fastest layout that labkit.plan finds: tests/course/test_lab_18.py.
BEST_S = {"an odd cluster": 9.4638, "a slow network": 10.5077, "half the memory": 10.6084}


@cache
def _replayed(sizes: Sizes, layout: Layout, global_batch: int, name: str) -> StepReport:
    return step_report(sizes, layout, global_batch, CLUSTERS[name])
