"""Jobs to place on a cluster: memory, bubble and inter-node bytes for an order of axes.

    {"dp": 2, "pp": 2, "tp": 2} on nodes of 4: outermost first, the last varies fastest

        node 0   [ 0  1 ][ 2  3 ]     tp 0-1, 2-3, 4-5, 6-7   inside
        node 1   [ 4  5 ][ 6  7 ]     pp 0-2, 1-3, 4-6, 5-7   inside
                                      dp 0-4, 1-5, 2-6, 3-7   leaves the node

An all-reduce uses a ring in the order of its ranks. Each rank sends 2(n-1)/n of the tensor to the
next rank; the bytes leave the node if the next rank is on a different node. In a pipeline, each
rank sends to the next rank. Micro-batches have one row, and only layers count, not the vocabulary.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from labkit.comm import Mesh, listen
from labkit.comm.mesh import factorizations, lines
from labkit.course.ranks import first_backward, warm
from labkit.models.gpt import Block
from labkit.parallel import DDP, Pipeline, split
from labkit.parallel.tensor.tensor_parallel import tensor_parallel

AXES = ("pp", "dp", "tp")


class Job(NamedTuple):
    """A GPT's layers to train on `nodes` nodes of `gpus` GPUs each."""

    nodes: int
    gpus: int  # per node
    memory_gb: float  # per GPU, for parameters, gradients and optimizer state
    depth: int
    width: int
    heads: int
    context: int
    rows: int  # per step, over all GPUs
    most_idle: float  # the largest fraction of the time that may be bubble
    element_bytes: int = 2  # of an activation or a gradient


JOBS = {
    "GPT-3 on 16 nodes": Job(16, 8, 48.0, 96, 12288, 96, 2048, 512, 0.2),
    "a model that fits on a GPU": Job(8, 8, 40.0, 24, 2048, 16, 1024, 4096, 0.1),
    "long texts": Job(8, 4, 48.0, 32, 4096, 32, 32768, 64, 0.2),
    "nodes of two": Job(16, 2, 32.0, 24, 8192, 64, 2048, 128, 0.15),
}
BEST_PERCENT = 80  # minimum, relative to the bytes of the rule of thumb
TINY = Job(2, 2, 1.2e-4, 4, 16, 4, 8, 8, 0.45, element_bytes=8)  # runs on 4 ranks


def parameters_of(job: Job, axes: Mapping[str, int]) -> int:
    """Parameters per rank: tp shards matrices, but not norms or the biases after an all-reduce."""
    w, layers = job.width, job.depth // axes["pp"]
    return layers * ((12 * w**2 + 7 * w) // axes["tp"] + 6 * w)


def held_gb(job: Job, axes: Mapping[str, int]) -> float:
    """GB per rank: 16 bytes per parameter, for mixed precision with Adam (lab 07)."""
    return 16 * parameters_of(job, axes) / 1e9


def idle(job: Job, axes: Mapping[str, int]) -> float:
    """The bubble of 1F1B, as a fraction of the step time."""
    m, p = job.rows // axes["dp"], axes["pp"]
    return (p - 1) / (m + p - 1)


def sent_by_a_rank(job: Job, axes: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a rank sends to the next rank on each axis in a step. On pp, only
    activations count: their gradients take as many bytes back."""
    x = job.rows // axes["dp"] * job.context * job.width * job.element_bytes  # [all rows, s, w]
    reduced = {axis: 2 * (n - 1) / n for axis, n in axes.items()}
    return {
        "tp": 4 * job.depth // axes["pp"] * reduced["tp"] * x,
        "pp": x,
        "dp": reduced["dp"] * parameters_of(job, axes) * job.element_bytes,
    }


def leaving_bytes(job: Job, axes: Mapping[str, int]) -> float:
    """Bytes of a step that leave a node, summed over all ranks."""
    sent, total = sent_by_a_rank(job, axes), 0.0
    for axis in axes:
        for line in lines(axes, axis):
            ring = [*pairwise(line), (line[-1], line[0])]
            links = pairwise(line) if axis == "pp" else ring
            leaving = sum(a // job.gpus != b // job.gpus for a, b in links)
            total += leaving * sent[axis] * (2 if axis == "pp" else 1)
    return total


def why_not(job: Job, axes: Mapping[str, int]) -> str:
    """Why a layout is invalid for this job; "" if it is valid."""
    if set(axes) != set(AXES) or not all(isinstance(n, int) and n >= 1 for n in axes.values()):
        return 'must have axes "pp", "dp" and "tp", each with a whole number'
    product = axes["pp"] * axes["dp"] * axes["tp"]
    if product != job.nodes * job.gpus:
        return f"uses {product} GPUs, but the job has {job.nodes * job.gpus}"
    for axis, what, number in (
        ("tp", "heads", job.heads), ("pp", "layers", job.depth), ("dp", "rows", job.rows)
    ):  # fmt: skip
        if number % axes[axis]:
            return f"has {axis}={axes[axis]}, which does not divide {number} {what}"
    if held_gb(job, axes) > job.memory_gb:
        return f"needs {held_gb(job, axes):.3g} GB per GPU, but a GPU has {job.memory_gb:g}"
    if idle(job, axes) > job.most_idle:
        return f"has a bubble of {idle(job, axes):.0%}, but the limit is {job.most_idle:.0%}"
    return ""


def by_rule(job: Job) -> dict[str, int]:
    """The rule of thumb: tensor parallelism in a node, the shortest pipeline over nodes that fits,
    and data parallelism with the remaining ranks."""
    layouts = (dict(zip(AXES, n)) for n in factorizations(job.nodes * job.gpus, 3))
    return max(
        (axes for axes in layouts if not why_not(job, axes)),
        key=lambda axes: (axes["tp"] <= job.gpus, axes["tp"], -axes["pp"]),
    )


# ---- bytes counted on ranks


def counted_on_4_ranks(axes: dict[str, int]) -> float:
    """The inter-node bytes of TINY, counted in real training and summed over all ranks."""
    warm(4, first_backward)
    return float(sum(warm(4, lambda: _leaving_bytes_of_rank(axes, TINY))))


def _leaving_bytes_of_rank(axes: dict[str, int], job: Job) -> float:
    """Bytes that this rank sends out of its node in a step."""
    mesh, s, w = Mesh(**axes), job.context, job.width
    torch.manual_seed(0)
    blocks = [Block(w, job.heads, job.heads, 0.0).double() for _ in range(job.depth)]
    stages = split(tensor_parallel(nn.Sequential(*blocks), mesh.tp), mesh.pp.size)
    rows = job.rows // mesh.dp.size
    pipe = Pipeline(
        stages, mesh.pp, "1f1b", rows, F.mse_loss, wrap=lambda stage: DDP(stage, mesh.dp)
    )
    x = torch.randn(job.rows, s, w, dtype=torch.float64).chunk(mesh.dp.size)[mesh.dp.rank]
    pipe.step(x, x)
    with listen() as events:
        pipe.step(x, x)
    leaving = 0.0
    for event in events:
        peer = (event.rank + 1) % len(event.ranks) if event.peer is None else event.peer
        target = event.ranks[peer]
        leaving += event.bus_bytes * (target // job.gpus != mesh.comm.rank // job.gpus)
    return leaving


def percent_of_rule(layout_of: Mapping[str, Mapping[str, int]]) -> float:
    """Inter-node bytes as a percentage of the rule of thumb's, averaged over the jobs."""
    ratios = [
        leaving_bytes(JOBS[name], axes) / leaving_bytes(JOBS[name], by_rule(JOBS[name]))
        for name, axes in layout_of.items()
    ]
    return 100 * sum(ratios) / len(ratios)
