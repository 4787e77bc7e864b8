"""What users do with a pipeline that concerns several ranks: clip, save, change modes, tie."""

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipeline_cases as cases
from labkit import (
    DDP,
    Comm,
    Mesh,
    RankError,
    World,
    ZeRO3,
    ZeroOptimizer,
    clip_grad_norm,
    full_state_dict,
    save_checkpoint,
    tensor_parallel,
)
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.splitting import split
from worlds import on_each_rank

SGD = torch.optim.SGD


def tokens() -> Tensor:
    torch.manual_seed(4)
    return torch.randint(0, 11, (8, 5))


def of_two(**how: Any) -> tuple[Mesh, Pipeline, Tensor]:
    """A GPT on two stages, each on two ranks that train on half of the tokens."""
    mesh = Mesh(pp=2, dp=2)
    x = tokens().split(4)[mesh.dp.rank]
    stages = split(cases.gpt(2, **how), 2)
    stages[mesh.pp.rank] = DDP(stages[mesh.pp.rank], mesh.dp)
    return mesh, Pipeline(stages, mesh.pp, "1f1b", 2, cases.tokens_loss), x


def clipped(how: str, tied: bool, norm_type: float) -> tuple[float, float, float]:
    """The norm in one process, that on the ranks, and how far gradients are apart."""
    whole = cases.gpt(2, tied=tied)
    cases.tokens_loss(whole(tokens()), tokens()).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05, norm_type)
    _, pipe, x = of_two(tied=tied)
    pipe.step(x, x)
    trained: Any = pipe if how == "pipeline" else SGD(pipe.parameters(), 0.1)
    told = clip_grad_norm(trained, 0.05, norm_type)
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    apart = [(p.grad - wanted[name].grad).abs().max() for name, p in pipe.module.named_parameters()]  # type: ignore[operator]
    return norm.item(), told.item(), max(apart).item()


@on_each_rank("world4")
def test_gradients_are_clipped_by_the_norm_of_all_stages() -> None:
    """By the pipeline and by an optimizer, which knows one stage; a tied parameter counts once."""
    kinds = [("pipeline", False, 2.0), ("pipeline", True, 2.0), ("optimizer", True, 2.0)]
    rank = [clipped(*kind) for kind in [*kinds, ("optimizer", False, float("inf"))]]
    for norm, told, apart in rank:
        assert norm > 0.05 and told == pytest.approx(norm, rel=1e-6) and apart < 1e-8


@on_each_rank("world4")
def test_pieces_are_clipped_by_the_norm_of_all_stages() -> None:
    whole = cases.gpt(2, tied=False)
    cases.tokens_loss(whole(tokens()), tokens()).backward()
    mesh = Mesh(pp=2, dp=2)
    x = tokens().split(4)[mesh.dp.rank]
    pipe = Pipeline(split(cases.gpt(2, tied=False), 2), mesh.pp, "1f1b", 2, cases.tokens_loss)
    zero = ZeroOptimizer(pipe.parameters(), SGD, comm=mesh.dp, lr=0.1)
    pipe.step(x, x)
    norm = nn.utils.get_total_norm([p.grad for p in whole.parameters()])  # type: ignore[misc]
    norm = norm.item()
    told = zero.clip_grad_norm_(0.05).item()
    assert told == pytest.approx(norm, rel=1e-6)


@on_each_rank("world4")
def test_without_its_pipeline_a_stage_is_clipped_alone() -> None:
    """Its ranks do not wait for others any more."""
    import gc

    stages = [nn.Linear(2, 2) for _ in range(4)]
    pipe = Pipeline(stages, None, "1f1b", 4, F.mse_loss)
    del pipe
    gc.collect()
    own = stages[Comm().rank]
    own(torch.ones(1, 2)).sum().backward()
    assert Comm().rank > 0 or clip_grad_norm(own, 1.0).item() > 0


# ---- a tie and pieces


def tied_and_cut_elsewhere() -> None:
    mesh = Mesh(pp=2, dp=2)
    stages = split(cases.gpt(2, tied=True), 2)
    stages[mesh.pp.rank] = ZeRO3(stages[mesh.pp.rank], mesh.dp)
    Pipeline(stages, mesh.pp, "1f1b", 2, cases.tokens_loss)


def tied_when_it_was_cut() -> None:
    mesh = Mesh(pp=2, dp=2)
    stages = split(cases.gpt(2, tied=True), 2)
    zero = ZeroOptimizer(stages[mesh.pp.rank].parameters(), SGD, comm=mesh.dp, lr=0.1)
    Pipeline(stages, mesh.pp, "1f1b", 2, cases.tokens_loss).step(tokens(), tokens())
    zero.step()


# ---- what one stage does that the others would suffer from


class Buffered(nn.Module):
    """Hands on the same memory for every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(2000, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out.copy_(x)


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return x


class Detaches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def pipe_of(*stages: nn.Module, loss_fn: Any = F.mse_loss, name: str = "1f1b") -> Pipeline:
    """Two stages, on ranks 0 and 1; the same again on ranks 2 and 3."""
    found = [Comm().subgroup(ranks) for ranks in ([0, 1], [2, 3])]
    return Pipeline(stages, found[Comm().rank // 2], name, 4, loss_fn)


def linear(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count)]


X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def output_overwritten() -> None:
    x = torch.ones(8000, 64)
    with torch.no_grad():
        pipe_of(Buffered(), Slow(), name="gpipe").step(x, x)


def last_stage_detaches() -> None:
    pipe_of(nn.Linear(4, 4), Detaches(4, 4)).step(X, Y)


def loss_detaches() -> None:
    pipe_of(*linear(), loss_fn=lambda out, y: F.mse_loss(out.detach(), y)).step(X, Y)


def one_rank_evaluates() -> None:
    pipe = pipe_of(*linear())
    pipe.step(X, Y)
    if pipe.comm.rank:
        pipe.eval()
    pipe.step(X, Y)


def one_rank_without_gradients() -> None:
    pipe = pipe_of(*linear())
    with torch.no_grad() if pipe.comm.rank else nullcontext():
        pipe.step(X, Y)


def one_rank_converts() -> None:
    pipe = pipe_of(*linear())
    pipe.step(X, Y)
    if pipe.comm.rank == 0:
        pipe.bfloat16()
    pipe.step(X, Y)


def saved_by_some() -> None:
    """Of a pipeline over two ranks, one."""
    pipe, comm = pipe_of(*linear()), Comm()
    alone = [comm.subgroup([rank]) for rank in range(4)][comm.rank]
    save_checkpoint("/nowhere", pipe, SGD(pipe.parameters(), 0.1), comm=alone)


REFUSED: list[tuple[Callable[[], None], str]] = [
    (
        tied_and_cut_elsewhere,
        "head.weight [11, 8] of stage 1 is tied over stages, and one of them is in ZeRO3, which",
    ),
    (tied_when_it_was_cut, "is tied over stages of a pipeline that was made later"),
    (
        output_overwritten,
        "the output of stage 0 (rank 0), micro-batch 0, was changed in place while it was under",
    ),
    (last_stage_detaches, "stage 1 (rank 1), micro-batch 0: the loss has no gradient"),
    (loss_detaches, "stage 1 (rank 1), micro-batch 0: the loss has no gradient"),
    (one_rank_evaluates, "eval mode, gradients, no autocast"),
    (one_rank_without_gradients, "train mode, no gradients, no autocast"),
    (one_rank_converts, "first step or changed since the last"),
    (saved_by_some, "would save a part of the model; give comm=mesh.comm"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("run", "expected"), REFUSED, ids=[run.__name__ for run, _ in REFUSED])
def test_it_is_refused(world4: World, run: Callable[[], None], expected: str) -> None:
    with pytest.raises(RankError) as caught:
        world4.run(run)
    assert expected in str(caught.value)


# ---- what is allowed


@on_each_rank("world4")
def test_a_pipeline_may_change_its_type_between_steps() -> None:
    """On all ranks, also those without parameters; their modes, too."""
    pipe = pipe_of(nn.Embedding(5, 4), nn.Tanh(), loss_fn=lambda out, y: out.float().pow(2).mean())
    x = torch.zeros(8, 2, dtype=torch.long)
    pipe.step(x, x)
    pipe.bfloat16().step(x, x)
    pipe.eval().step(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.train().step(x, x)
    assert all(p.dtype == torch.bfloat16 for p in pipe.parameters())


def test_a_loss_of_one_element_and_an_input_that_wants_a_gradient(world4: World) -> None:
    def run() -> tuple[Any, Any, int]:
        x = X.clone().requires_grad_()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss = pipe_of(*linear(), loss_fn=lambda a, b: F.mse_loss(a, b).reshape(1)).step(x, Y)
        wanted = pipe_of(*linear()).step(X, Y)
        return loss, wanted, len(said)

    first, (loss, wanted, said), *_ = world4.run(run)
    assert first == (None, None, 0) and said == 0
    assert loss.shape == () and loss == wanted


@on_each_rank("world4")
def test_the_state_of_the_model_is_whole() -> None:
    """Of all stages, and of parameters cut by tensor parallelism; by either name."""
    mesh = Mesh(pp=2, tp=2)
    model = tensor_parallel(cases.gpt(2, tied=False), mesh.tp)
    pipe = Pipeline(split(model, 2), mesh.pp, "1f1b", 2, cases.tokens_loss)
    whole = cases.gpt(2, tied=False).state_dict()
    for state in (full_state_dict(pipe), pipe.full_state_dict()):
        assert state.keys() == whole.keys()
        assert all(torch.equal(x, whole[name]) for name, x in state.items())
    assert True


@on_each_rank("world4")
def test_the_state_of_stages_in_zero3_is_whole() -> None:
    """Its clipping is by the norm of all stages, too."""

    def stages() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).double() for _ in range(2)]

    mesh = Mesh(pp=2, dp=2)
    whole, mine = nn.Sequential(*stages()), stages()
    zero = mine[mesh.pp.rank] = ZeRO3(mine[mesh.pp.rank], comm=mesh.dp)
    pipe = Pipeline(mine, mesh.pp, "1f1b", 2, F.mse_loss)
    state, wanted = pipe.full_state_dict(), whole.state_dict()
    same = state.keys() == wanted.keys()
    same &= all(torch.equal(x, wanted[name]) for name, x in state.items())
    x = torch.ones(4, 3).double()
    pipe.step(x, 2 * x)
    F.mse_loss(whole(x), 2 * x).backward()
    norm = nn.utils.get_total_norm([p.grad for p in whole.parameters()])  # type: ignore[misc]
    norm = norm.item()
    told = zero.clip_grad_norm_(0.05).item()
    assert same and told == pytest.approx(norm, rel=1e-6)


@on_each_rank("world4")
def test_tied_replicas_add_up_the_gradients_of_steps() -> None:
    """DDP's gradients are its buckets, which the next step fills: what was there before must not
    be lost, be it a gradient, or zeros that an earlier one has left."""
    whole = cases.gpt(2, tied=True)
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    _, pipe, x = of_two(tied=True)
    apart = []
    for targets, zeros in [((1, 2), False), ((3,), False), ((4,), True), ((5, 6), True)]:
        whole.zero_grad(set_to_none=not zeros)
        pipe.zero_grad(set_to_none=not zeros)
        for more in targets:
            cases.tokens_loss(whole(tokens()), (tokens() + more) % 11).backward()
            pipe.step(x, (x + more) % 11)
        found = pipe.module.named_parameters()
        apart.append(max((p.grad - wanted[name].grad).abs().max().item() for name, p in found))  # type: ignore[operator]
    assert max(apart) < 1e-9


@pytest.mark.parametrize("kind", [DDP, ZeRO3])
def test_the_norm_is_the_same_to_the_bit_where_a_stage_adds_nothing(
    world4: World, kind: Any
) -> None:
    """A last stage that has but the tied weight, or, in ZeRO3, nothing to train."""

    def run() -> float:
        torch.manual_seed(0)
        first, last = (nn.Linear(3, 3, bias=False).double() for _ in range(2))
        if kind is DDP:
            last.weight = first.weight
        last.requires_grad_(kind is DDP)
        mesh = Mesh(pp=2, dp=2)
        stages = [nn.Sequential(first, nn.Tanh(), nn.Linear(3, 3).double()), last]
        pipe = Pipeline(stages, mesh.pp, "1f1b", 2, F.mse_loss, wrap=partial(kind, comm=mesh.dp))
        pipe.step(torch.ones(4, 3).double(), torch.ones(4, 3).double())
        return clip_grad_norm(pipe, 0.01).item()

    assert len(set(world4.run(run))) == 1


# ---- faults


def counts_all_copies() -> Any:
    return patch.object(Pipeline, "counts_here", lambda self, p: True)


@on_each_rank("world4")
def test_faulty_clipping_is_found() -> None:
    with counts_all_copies():
        norm, told, _ = clipped("optimizer", True, 2.0)
    assert abs(norm - told) > 1e-3 * norm
