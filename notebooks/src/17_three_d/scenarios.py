"""Runs lab 17's answers on the ranks of a mesh, and computes the correct results."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm import Mesh, listen
from labkit.comm.mesh import coordinates, lines
from labkit.course.exercise import Student
from labkit.course.ranks import first_backward, warm
from labkit.course.samples import detached
from labkit.models import GPT
from labkit.models.gpt import Block
from labkit.parallel import DDP, Pipeline, split
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.parallel.tensor.tensor_parallel import tensor_parallel

Axes = dict[str, int]

# ---- place(rank, axes, rows)

PLACES: tuple[tuple[Axes, int], ...] = (  # axes (outermost first), rows of a global batch
    ({"pp": 2, "dp": 2, "tp": 2}, 16),
    ({"tp": 2, "dp": 2, "pp": 2}, 16),
    ({"pp": 3, "dp": 2, "tp": 2}, 8),
    ({"dp": 3, "pp": 4, "tp": 1}, 12),
    ({"pp": 1, "dp": 4, "tp": 2}, 8),
)


class Place(NamedTuple):
    """A rank's rows, the next stage's rank, and the rank's groups."""

    rows: tuple[int, int]
    after: int | None
    averaged: list[int]
    tied: list[int] | None


def right_place(rank: int, axes: Mapping[str, int], rows: int) -> Place:
    """The place according to the groups of a Mesh."""
    stages, replicas = (_line(axes, axis, rank) for axis in ("pp", "dp"))
    index, share = coordinates(axes, rank)["dp"], rows // axes["dp"]
    last = rank == stages[-1]
    ends = [stages[0], stages[-1]] if len(stages) > 1 and rank in (stages[0], stages[-1]) else None
    return Place(
        (index * share, (index + 1) * share),
        None if last else stages[stages.index(rank) + 1],
        replicas,
        ends,
    )


def _line(axes: Mapping[str, int], axis: str, rank: int) -> list[int]:
    return next(line for line in lines(axes, axis) if rank in line)


# ---- sent_bytes(training, stage)

MESHES: tuple[Axes, ...] = (  # of 4 ranks
    {"pp": 2, "dp": 1, "tp": 2},
    {"pp": 1, "dp": 2, "tp": 2},
    {"pp": 4, "dp": 1, "tp": 1},
    {"pp": 1, "dp": 4, "tp": 1},
    {"pp": 1, "dp": 1, "tp": 4},
)
GPT_SIZES: dict[str, Any] = dict(vocab=64, width=16, depth=4, heads=4, context=8)
ROWS, MICROBATCHES = 8, 2


class Training(NamedTuple):
    """A GPT trained on a mesh, in float64, with a tied embedding."""

    axes: Axes  # "pp", "dp" and "tp"
    rows: int  # of a step, over all replicas
    context: int
    width: int
    vocab: int  # divisible by tp
    layers: list[int]  # per stage
    parameters: list[int]  # per rank, for each stage


@cache
def counted_bytes() -> list[tuple[Training, list[dict[str, int]]]]:
    """Each training, and the bytes per step that a rank of each stage sends, by axis."""
    warm(4, first_backward)
    of_ranks = warm(4, lambda: [_step(axes) for axes in MESHES])
    return [_by_stage(axes, of_mesh) for axes, of_mesh in zip(MESHES, zip(*of_ranks))]


def _by_stage(axes: Axes, of_ranks: Sequence[Any]) -> tuple[Training, list[dict[str, int]]]:
    of_stage = {stage: (sizes, sent) for stage, sizes, sent in of_ranks}
    assert all(of_stage[stage] == (sizes, sent) for stage, sizes, sent in of_ranks)
    sizes = [of_stage[stage][0] for stage in range(axes["pp"])]
    training = Training(
        axes, ROWS, GPT_SIZES["context"], GPT_SIZES["width"], GPT_SIZES["vocab"],
        [layers for layers, _ in sizes], [parameters for _, parameters in sizes],
    )  # fmt: skip
    return training, [of_stage[stage][1] for stage in range(axes["pp"])]


def _step(axes: Axes) -> tuple[int, tuple[int, int], dict[str, int]]:
    """This rank's stage, layer count, parameter count, and bytes by axis."""
    mesh = Mesh(**axes)
    torch.manual_seed(0)
    model = tensor_parallel(GPT(**GPT_SIZES).double(), mesh.tp, gather_logits=False)
    stages = split(model, mesh.pp.size)
    stage = stages[mesh.pp.rank]
    sizes = (
        sum(isinstance(x, Block) for x in stage.modules()),
        sum(p.numel() for p in stage.parameters()),
    )
    pipe = Pipeline(
        stages, mesh.pp, "1f1b", MICROBATCHES,
        lambda logits, y: vocab_parallel_cross_entropy(logits, y, mesh.tp),
        wrap=lambda stage: DDP(stage, mesh.dp),
    )  # fmt: skip
    tokens = torch.arange(ROWS * GPT_SIZES["context"]).view(ROWS, -1) % GPT_SIZES["vocab"]
    tokens = tokens.chunk(mesh.dp.size)[mesh.dp.rank]
    pipe.step(tokens, tokens)
    with listen() as events:
        pipe.step(tokens, tokens)
    sent = dict.fromkeys(("tensor", "pipeline", "data", "embedding"), 0.0)
    for event in events:
        sent[_axis_of(event, mesh)] += event.bus_bytes
    return mesh.pp.rank, sizes, {axis: round(x) for axis, x in sent.items()}


def _axis_of(event: Any, mesh: Mesh) -> str:
    """The axis of an event. On pp, stages send messages, and the embedding group all-reduces."""
    if event.ranks == mesh.tp.ranks:
        return "tensor"
    if event.ranks == mesh.dp.ranks:
        return "data"
    return "pipeline" if event.op in ("send", "recv") else "embedding"


# ---- global_norm(mesh, gradients)

NORM_MESHES: tuple[Axes, ...] = (
    {"pp": 2, "dp": 2, "tp": 2},
    {"tp": 2, "dp": 1, "pp": 4},
    {"pp": 2, "dp": 1, "tp": 4},
    {"pp": 1, "dp": 4, "tp": 2},
)


class Gradient(NamedTuple):
    """A parameter's gradient on this rank, averaged over replicas; tied gradients are also summed.

    `is_cut`: sharded over tp; otherwise the same on all ranks of mesh.tp. `is_tied`: the
    embedding, on the first stage, and the head, on the last."""

    g: Tensor
    is_cut: bool
    is_tied: bool


def gradients_of(stage: int, stages: int) -> list[Gradient]:
    """Whole gradients of a stage: a matrix, a norm; on the first and last stage, the embedding."""
    generator = torch.Generator().manual_seed(40 + stage)

    def drawn(*shape: int) -> Tensor:
        return (1 + stage) * torch.randn(*shape, generator=generator, dtype=torch.float64)

    gradients = [Gradient(drawn(8, 6), True, False), Gradient(drawn(5), False, False)]
    if stage in (0, stages - 1):
        generator.manual_seed(39)
        table = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        gradients.append(Gradient(3 * table, True, True))
    return gradients


def run_global_norm(comm: Any, axes: Axes, student: Student) -> float:
    """The student's result for this rank's gradients, and the bytes sent."""
    mesh = Mesh(comm, **axes)
    gradients = [
        grad._replace(g=grad.g.chunk(mesh.tp.size)[mesh.tp.rank].clone()) if grad.is_cut else grad
        for grad in gradients_of(mesh.pp.rank, mesh.pp.size)
    ]
    with listen() as events:
        found = student(mesh, gradients)
    return detached(found), sum(event.bus_bytes for event in events)  # type: ignore[return-value]


def squared_norms(axes: Axes) -> tuple[list[float], list[float], float]:
    """Sums of squares: sharded and replicated gradients per stage, and the embedding's gradient."""
    cut: list[float] = []
    whole: list[float] = []
    for stage in range(axes["pp"]):
        grads = [grad for grad in gradients_of(stage, axes["pp"]) if not grad.is_tied]
        for is_cut, sums in ((True, cut), (False, whole)):
            sums.append(sum(float(x.g.square().sum()) for x in grads if x.is_cut is is_cut))
    tied = next(grad for grad in gradients_of(0, axes["pp"]) if grad.is_tied)
    return cut, whole, float(tied.g.square().sum())


# ---- hand_on(mesh, x)

HAND_ON_MESHES: tuple[Axes, ...] = (
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 2, "dp": 1, "tp": 4},
    {"pp": 2, "dp": 4, "tp": 1},
)
SHAPE = (3, 4, 8)  # b, s, w: in float64, 768 bytes


def replica_input(replica: int) -> Tensor:
    """The tensor that the first stage of a replica sends."""
    generator = torch.Generator().manual_seed(70 + replica)
    return torch.randn(*SHAPE, generator=generator, dtype=torch.float64)


def run_hand_on(comm: Any, axes: Axes, student: Student) -> tuple[Any, dict[str, float]]:
    """This rank's result, and the bytes that it sent, by axis."""
    mesh = Mesh(comm, **axes)
    x = replica_input(mesh.dp.rank)
    if mesh.pp.rank:
        x.fill_(float("nan"))
    with listen() as events:
        found = student(mesh, x)
    sent = dict.fromkeys(("pp", "tp", "others"), 0.0)
    for event in events:
        names = [axis for axis in ("pp", "tp") if event.ranks == mesh[axis].ranks]
        sent[names[0] if names else "others"] += event.bus_bytes
    return detached(found), sent
