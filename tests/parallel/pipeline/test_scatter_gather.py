"""Scatter/gather of pipeline sends: the same numbers, to the bit, in 1/t of the bytes."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import labkit
from harness import Mutation, noticed, on_ranks, replaces
from labkit import DDP, GPT, Comm, Mesh, RankError, World, listen, split
from labkit import comm as door
from labkit.events import all_gather_bus_bytes, chunk_sizes
from labkit.parallel.common.shards import Shard, mark_shard
from labkit.parallel.context.context_parallel import SequenceParts
from labkit.parallel.pipeline import p2p, scatter_gather
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.pipeline.scatter_gather import ScatterGather
from pipeline_cases import DATA, descend, layers, piped, tokens_loss
from small_models import Custom
from tables import raises
from worlds import on_each_rank, world_fixture

ROWS, LENGTH, WIDTH = 6, 5, 6  # rows of a step
SENT = [("send", tag) for tag in DATA.values()]
SHAPES = [{"pp": 3, "tp": 2}, {"pp": 2, "tp": 3}]
MESH = partial(Mesh, pp=3, tp=2)
six = world_fixture(6, timeout_s=20)


def tokens() -> Tensor:
    return torch.randint(0, 12, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def gpt_on(mesh: Mesh, chunks: int = 1, **how: Any) -> list[nn.Module]:
    torch.manual_seed(3)
    model = GPT(12, WIDTH, mesh.pp.size * chunks, 3 if mesh.tp.size == 3 else 2, LENGTH).double()
    return split(labkit.tensor_parallel(model, mesh.tp, **how), mesh.pp.size * chunks)


def assert_same_bits(
    make: Callable[[], list[nn.Module]], mesh: Mesh, x: Tensor, loss: Any, **how: Any
) -> None:
    pipes = [Pipeline(make(), mesh.pp, loss_fn=loss, scatter_gather=parts, **how)
             for parts in (None, mesh.tp)]  # fmt: skip
    losses, shared = (piped(pipe, x, x, 2) for pipe in pipes)
    assert shared == losses, f"losses {shared}, and {losses} without scatter/gather"
    weights = zip(*(pipe.parameters() for pipe in pipes), strict=True)
    same = [torch.equal(a, b) for a, b in weights]
    assert all(same), f"{same.count(False)} of {len(same)} parameters differ"


def a_gpt_has_the_same_bits(axes: dict[str, int]) -> None:
    mesh, how = Mesh(**axes), {"schedule": "1f1b", "microbatches": 3}
    assert_same_bits(lambda: gpt_on(mesh), mesh, tokens(), tokens_loss, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("pipedream", 1)]
)
@pytest.mark.parametrize("axes", SHAPES, ids=str)
@on_each_rank("six")
def test_any_schedule_has_the_same_bits(schedule: str, chunks: int, axes: dict[str, int]) -> None:
    mesh = Mesh(**axes)
    how: dict[str, Any] = {"schedule": schedule, "microbatches": 6}
    if schedule == "pipedream":
        how["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        x = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(2)).double()
        assert_same_bits(lambda: layers(mesh.pp.size), mesh, x, F.mse_loss, **how)
    else:
        how["recompute"] = schedule == "gpipe"
        assert_same_bits(lambda: gpt_on(mesh, chunks), mesh, tokens(), tokens_loss, **how)


def turned(linear: nn.Linear) -> nn.Module:
    return Custom(lambda m, x: m.linear(x).transpose(1, 2), linear=linear)


ODD: dict[str, Callable[[int], tuple[list[nn.Module], Tensor]]] = {
    "7-elements": lambda p: ([nn.Linear(7, 7) for _ in range(p)], torch.ones(3, 7)),
    "fewer-elements-than-ranks": lambda p: ([nn.Linear(1, 1) for _ in range(p)], torch.ones(3, 1)),
    "no-elements": lambda p: ([nn.Linear(0, 0) for _ in range(p)], torch.ones(3, 0)),
    "bf16": lambda p: ([nn.Linear(5, 5).bfloat16() for _ in range(p)], torch.ones(3, 5).bfloat16()),
    "not-contiguous": lambda p: ([turned(nn.Linear(5, 5)) for _ in range(p)], torch.ones(3, 5, 5)),
    "without-gradient": lambda p: ([nn.Tanh() for _ in range(p)], torch.ones(3, 5)),
    "uneven-rows": lambda p: ([nn.Linear(3, 3) for _ in range(p)], torch.ones(5, 3)),
}


@pytest.mark.parametrize("axes", SHAPES, ids=str)
@on_each_rank("six")
def test_odd_sizes_types_and_layouts_have_the_same_bits(axes: dict[str, int]) -> None:
    """Stages that tensor-parallel ranks have whole are as good as any."""
    mesh = Mesh(**axes)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out.float() - 2).square().sum()

    for made in ODD.values():

        def make(made: Any = made) -> list[nn.Module]:
            torch.manual_seed(0)
            return made(mesh.pp.size)[0]

        assert_same_bits(make, mesh, made(mesh.pp.size)[1], loss, microbatches=3)


@on_each_rank("six")
def test_one_rank_and_one_stage_are_the_same_code() -> None:
    """pp x 1 has nobody to share with; of 1 x tp nothing travels, chunks or not."""
    mesh = Mesh(pp=6, tp=1)
    x = torch.ones(6, 2, 3).double()
    assert_same_bits(lambda: layers(6), mesh, x, F.mse_loss, microbatches=3)
    mesh = Mesh(pp=1, tp=6)
    how: dict[str, Any] = {"chunks": 2, "scatter_gather": mesh.tp}
    pipe = Pipeline(layers(2), mesh.pp, "interleaved", 2, F.mse_loss, **how)
    with listen() as events:
        pipe.step(x, x)
    assert not events


def sends_its_part(axes: dict[str, int]) -> None:
    """A boundary and micro-batch: b s h / t elements, an all-gather, and the stages' own."""
    mesh = Mesh(**axes)
    t, m, whole_bytes = mesh.tp.size, 3, ROWS // 3 * LENGTH * WIDTH * 8
    found: list[Counter[Any]] = []
    for parts in (None, mesh.tp):
        pipe = Pipeline(gpt_on(mesh), mesh.pp, "1f1b", m, tokens_loss, scatter_gather=parts)
        pipe.step(tokens(), tokens())  # the first tells what travels looks like
        descend(pipe)
        with listen() as events:
            pipe.step(tokens(), tokens())
        found.append(Counter((e.op, e.tag, e.peer, e.bus_bytes) for e in events if e.op != "recv"))
    plain, shared = found
    stage, last = mesh.pp.rank, mesh.pp.size - 1
    right: Counter[Any] = Counter(plain)
    mine = chunk_sizes(whole_bytes // 8, t)[mesh.tp.rank] * 8
    for tag, there, peer in (
        (DATA["activation"], stage < last, stage + 1),
        (DATA["gradient"], stage > 0, stage - 1),
    ):
        assert plain["send", tag, peer, whole_bytes] == (m if there else 0)
        right[("send", tag, peer, whole_bytes)] -= m * there
        right[("send", tag, peer, mine)] += m * there
    sizes = [n * 8 for n in chunk_sizes(whole_bytes // 8, t)]
    joined = all_gather_bus_bytes(sizes, mesh.tp.rank)
    gathers = m * ((stage > 0) + (stage < last))
    kinds = [key for key in shared if key[0] == "all_gather" and key[-1] == joined]
    more = sum(shared[key] - plain[key] for key in kinds)
    assert more == gathers, f"{more} all-gathers of {joined} bytes, not {gathers}"
    for key in kinds:
        right[key] = shared[key]
    assert shared == +right, f"{shared - right} too much, {right - shared} missing"
    assert joined == whole_bytes * (t - 1) // t


@pytest.mark.parametrize("axes", SHAPES, ids=str)
@pytest.mark.parametrize("check", [a_gpt_has_the_same_bits, sends_its_part])
def test_a_gpt_in_parts(six: World, check: Any, axes: dict[str, int]) -> None:
    six.run(check, axes)


@on_each_rank("six")
def test_receives_are_posted_ahead_and_joined_when_taken() -> None:
    """Receive k + 1 is posted before forward k runs, and gathered only when forward k is done."""
    mesh, m = Mesh(pp=3, tp=2), 5
    log: list[tuple[str, int]] = []
    stages = [nn.Linear(4, 4) for _ in range(3)]
    for one in stages:
        one.register_forward_pre_hook(lambda *_: log.append(("forward", 0)))
    pipe = Pipeline(stages, mesh.pp, "gpipe", m, F.mse_loss, scatter_gather=mesh.tp)
    x = torch.ones(m, 4)
    pipe.step(x, x)
    log.clear()
    with door.listen_with(lambda event: log.append((event.op, event.tag))):
        pipe.step(x, x)
    if mesh.pp.rank == 0:
        return
    forwards = [i for i, (what, _) in enumerate(log) if what == "forward"]
    posts = [i for i, one in enumerate(log) if one == ("recv", DATA["activation"])]
    joins = [i for i, (what, _) in enumerate(log) if what == "all_gather"][:m]
    assert len(posts) == len(forwards) == len(joins) == m
    assert all(posts[k + 1] < forwards[k] < joins[k + 1] < forwards[k + 1] for k in range(m - 1))


@pytest.mark.slow
def test_on_paper_the_first_stage_sends_its_part(six: World) -> None:
    def work() -> list[Any]:
        mesh = Mesh(pp=3, tp=2)
        pipe = Pipeline(gpt_on(mesh), mesh.pp, "1f1b", 3, tokens_loss, scatter_gather=mesh.tp)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        x = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        for _ in range(2):
            with listen() as events:
                pipe.step(x, x)
            optimizer.step()
        return list(events)

    def issued(events: list[Any]) -> Counter[Any]:
        ours = [e for e in events if e.op == "all_gather" or (e.op, e.tag) in SENT]
        return Counter((e.op, e.tag, e.bus_bytes) for e in ours)

    on_paper = issued([e for e in labkit.dry_run(work, ranks=6).ranks[0].comms if e.step == 1])
    part_bytes = ROWS // 3 * LENGTH * WIDTH * 8 // 2
    kinds = [("send", DATA["activation"], part_bytes), ("all_gather", 0, part_bytes)]
    assert on_paper == issued(six.run(work)[0]) == Counter(3 * kinds)


def piped_over(stages: list[nn.Module], mesh: Mesh, over: Comm | None) -> Pipeline:
    return Pipeline(stages, mesh.pp, loss_fn=tokens_loss, scatter_gather=over)


def parts_of_sequences() -> None:
    mesh = Mesh(pp=3, cp=2)
    model = labkit.context_parallel(GPT(12, 6, 3, 2, 6), mesh.cp)
    piped_over(split(model, 3), mesh, mesh.cp)


def other_ranks_than_the_cut(mesh: Mesh) -> None:
    across = [Comm().subgroup(ranks) for ranks in ([0, 3], [2, 5], [1, 4])]
    piped_over(gpt_on(mesh), mesh, next(one for one in across if one is not None))


def other_data() -> None:
    mesh = Mesh(pp=3, dp=2)
    stages = [DDP(one, mesh.dp) if i == mesh.pp.rank else one for i, one in enumerate(layers(3))]
    pipe = Pipeline(stages, mesh.pp, "1f1b", 2, F.mse_loss, scatter_gather=mesh.dp)
    x = torch.full((2, 2, 3), float(mesh.dp.rank)).double()
    pipe.step(x, x)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "cut_sequence": (
        lambda: piped_over(gpt_on(mesh := MESH(), sequence=True), mesh, mesh.tp),
        "is sharded along the sequence (sequence=True), so each rank already"),
    "parts_of_sequences": (
        parts_of_sequences, "share sequences (context_parallel); omit scatter_gather"),
    "stages_of_the_pipeline": (
        lambda: piped_over(layers(3), mesh := MESH(), mesh.pp),
        "have different stages of this pipeline"),
    "other_ranks_than_the_cut": (
        lambda: other_ranks_than_the_cut(MESH()),
        "are sharded over ranks [0, 1], not [0, 3]; pass mesh.tp"),
    "not_on_all_stages": (
        lambda: piped_over(layers(3), mesh := MESH(), mesh.tp if mesh.pp.rank < 2 else None),
        "scatter_gather differs: None on rank 2 of the pipeline, index 0 of 2 on"),
    "other_data": (
        other_data, "the output of stage 0 (rank 0), micro-batch 0, differs between the ranks"),
}  # fmt: skip


def test_shards_over_other_ranks_are_named_before_parts_of_sequences() -> None:
    """Whichever parameter has which mark."""
    tp, cp, pp = (SimpleNamespace(ranks=ranks) for ranks in ((0, 1), (0, 3), (0, 2, 4)))
    for first, second in (("weight", "bias"), ("bias", "weight")):
        stage = nn.Linear(3, 4)
        SequenceParts(cp).attach_to(getattr(stage, first))
        mark_shard(getattr(stage, second), Shard(tp, 0, 0, 4, 8))
        expected = "parameters are sharded over ranks [0, 1], not [0, 3]; pass mesh.tp"
        assert scatter_gather._mismatch(cp, pp, [stage]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused(six: World, what: str) -> None:
    run, words = REFUSED[what]
    raises((words,), six.run, run, error=RankError)


@replaces(ScatterGather, "own_part")
def sends_the_part_of_the_next_rank(real: Any, self: Any, x: Tensor, what: str) -> Tensor:
    parts = self.parts(x.contiguous())
    mine = parts[self.comm.rank]
    return parts[(self.comm.rank + 1) % self.comm.size][: mine.numel()].clone()


@contextmanager
def shares_over_replicas() -> Iterator[None]:
    """Over the data-parallel ranks, which have other data; where ranks compare no notes."""
    of = partial(Pipeline, scatter_gather=Mesh(pp=2, dp=3).dp)
    unchecked = patch.object(scatter_gather, "check_same", lambda *_: None)
    with unchecked, patch(f"{__name__}.Pipeline", of):
        yield


def replicas_compute_their_own() -> None:
    mesh = Mesh(pp=2, dp=3)
    x = torch.full((2, 2, 3), float(mesh.dp.rank)).double()
    right = F.mse_loss(nn.Sequential(*layers(2))(x), x).item()
    loss = Pipeline(layers(2), mesh.pp, "1f1b", 2, F.mse_loss).step(x, x)
    assert loss is None or abs(loss.item() - right) < 1e-10


@replaces(p2p.P2PChannel, "__init__")
def sends_all_of_it(real: Any, self: Any, comm: Any, schedule: Any, parts: Any = None) -> None:
    """The whole goes over the wires, and each takes its part: the numbers are right."""
    real(self, comm, schedule, None)


FAULTS = [
    Mutation(sends_the_part_of_the_next_rank, a_gpt_has_the_same_bits, SHAPES[0]),
    Mutation(shares_over_replicas, replicas_compute_their_own),
    Mutation(sends_all_of_it, sends_its_part, SHAPES[0]),
]
test_a_fault_turns_its_check_red = pytest.mark.slow(
    noticed(FAULTS, on_ranks, RankError, match="AssertionError", size=6, timeout_s=20)
)
