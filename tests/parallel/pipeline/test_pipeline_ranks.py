"""What users do with a pipeline that concerns several ranks: clip, save, change modes, tie."""

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import labkit
import pipeline_cases as cases
from labkit import DDP, Comm, Mesh, RankError, World, ZeRO3, ZeroOptimizer, clip_grad_norm
from labkit.parallel.paced_stage import PacedStage
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.splitting import split
from small_models import Custom
from tables import raises
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


@pytest.mark.parametrize(
    ("how", "tied", "norm_type"),
    [("pipeline", False, 2.0), ("pipeline", True, 2.0), ("optimizer", True, 2.0),
     ("optimizer", False, float("inf"))],
)  # fmt: skip
@on_each_rank("world4")
def test_clipping_is_by_the_norm_of_all_stages(how: str, tied: bool, norm_type: float) -> None:
    """By the pipeline and by an optimizer, which knows one stage; a tied parameter counts once."""
    whole = cases.gpt(2, tied=tied)
    cases.tokens_loss(whole(tokens()), tokens()).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05, norm_type).item()
    _, pipe, x = of_two(tied=tied)
    pipe.step(x, x)
    trained: Any = pipe if how == "pipeline" else SGD(pipe.parameters(), 0.1)
    assert norm > 0.05
    with warnings.catch_warnings(action="error"):
        assert clip_grad_norm(trained, 0.05, norm_type).item() == pytest.approx(norm, rel=1e-6)
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    for name, p in pipe.module.named_parameters():
        assert (p.grad - wanted[name].grad).abs().max() < 1e-8


@on_each_rank("world4")
def test_without_its_pipeline_a_stage_is_clipped_alone() -> None:
    stages = [nn.Linear(2, 2) for _ in range(4)]
    pipe = Pipeline(stages, None, "1f1b", 4, F.mse_loss)
    del pipe
    gc.collect()
    own = stages[Comm().rank]
    own(torch.ones(1, 2)).sum().backward()
    assert Comm().rank > 0 or clip_grad_norm(own, 1.0).item() > 0


def tied_when_it_was_cut() -> None:
    mesh = Mesh(pp=2, dp=2)
    stages = split(cases.gpt(2, tied=True), 2)
    zero = ZeroOptimizer(stages[mesh.pp.rank].parameters(), SGD, comm=mesh.dp, lr=0.1)
    Pipeline(stages, mesh.pp, "1f1b", 2, cases.tokens_loss).step(tokens(), tokens())
    zero.step()


def pipe_of(*stages: nn.Module, loss_fn: Any = F.mse_loss, name: str = "1f1b") -> Pipeline:
    """Two stages, on ranks 0 and 1; the same again on ranks 2 and 3."""
    found = [Comm().subgroup(ranks) for ranks in ([0, 1], [2, 3])]
    return Pipeline(stages, found[Comm().rank // 2], name, 4, loss_fn)


def linear(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count)]


X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def output_overwritten() -> None:
    """The first stage hands on the same memory for every micro-batch; the second is slow."""
    buffered = Custom(lambda m, x: m.out.copy_(x), out=torch.zeros(2000, 64))
    x = torch.ones(8000, 64)
    with torch.no_grad():
        pipe_of(buffered, PacedStage(0.05), name="gpipe").step(x, x)


def changed_on(rank: int, change: Callable[[Pipeline], Any]) -> None:
    """Between two steps, on one rank of each pipeline."""
    pipe = pipe_of(*linear())
    pipe.step(X, Y)
    if pipe.comm.rank == rank:
        change(pipe)
    pipe.step(X, Y)


def one_rank_without_gradients() -> None:
    pipe = pipe_of(*linear())
    with torch.no_grad() if pipe.comm.rank else nullcontext():
        pipe.step(X, Y)


def saved_by_some() -> None:
    pipe, comm = pipe_of(*linear()), Comm()
    alone = [comm.subgroup([rank]) for rank in range(4)][comm.rank]
    labkit.save_checkpoint("/nowhere", pipe, SGD(pipe.parameters(), 0.1), comm=alone)


def tied_and_cut_elsewhere() -> None:
    mesh, stages = Mesh(pp=2, dp=2), split(cases.gpt(2, tied=True), 2)
    stages[mesh.pp.rank] = ZeRO3(stages[mesh.pp.rank], mesh.dp)
    Pipeline(stages, mesh.pp, "1f1b", 2, cases.tokens_loss)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tied_and_cut_elsewhere": (
        tied_and_cut_elsewhere,
        "head.weight [11, 8] of stage 1 is tied across stages, but one stage uses ZeRO3, which"),
    "tied_when_it_was_cut": (
        tied_when_it_was_cut, "is tied across stages of a pipeline created later"),
    "output_overwritten": (
        output_overwritten,
        "the output of stage 0 (rank 0), micro-batch 0, was changed in place while it was being"),
    "last_stage_detaches": (
        lambda: pipe_of(nn.Linear(4, 4), Custom(
            lambda m, x: m.layer(x).detach(), layer=nn.Linear(4, 4))).step(X, Y),
        "stage 1 (rank 1), micro-batch 0: the loss has no gradient"),
    "loss_detaches": (
        lambda: pipe_of(*linear(), loss_fn=lambda out, y: F.mse_loss(out.detach(), y)).step(X, Y),
        "stage 1 (rank 1), micro-batch 0: the loss has no gradient"),
    "one_rank_evaluates": (
        lambda: changed_on(1, lambda pipe: pipe.eval()), "eval mode, gradients, no autocast"),
    "one_rank_without_gradients": (
        one_rank_without_gradients, "train mode, no gradients, no autocast"),
    "one_rank_converts": (
        lambda: changed_on(0, lambda pipe: pipe.bfloat16()),
        "first step or changed since the last"),
    "saved_by_some": (saved_by_some, "would save only a part of the model; pass comm=mesh.comm"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(world4: World, name: str) -> None:
    run, words = REFUSED[name]
    raises((words,), world4.run, run, error=RankError)


@on_each_rank("world4")
def test_a_pipeline_may_change_its_type_between_steps() -> None:
    pipe = pipe_of(nn.Embedding(5, 4), nn.Tanh(), loss_fn=lambda out, y: out.float().pow(2).mean())
    x = torch.zeros(8, 2, dtype=torch.long)
    pipe.step(x, x)
    pipe.bfloat16().step(x, x)
    pipe.eval().step(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.train().step(x, x)
    assert all(p.dtype == torch.bfloat16 for p in pipe.parameters())


@on_each_rank("world4")
def test_a_loss_of_one_element_and_an_input_that_wants_a_gradient() -> None:
    x = X.clone().requires_grad_()
    with warnings.catch_warnings(record=True, action="always") as caught:
        loss = pipe_of(*linear(), loss_fn=lambda a, b: F.mse_loss(a, b).reshape(1)).step(x, Y)
    expected = pipe_of(*linear()).step(X, Y)
    assert not caught and (loss is None) == (Comm().rank % 2 == 0)
    assert loss is None or (loss.shape == () and loss == expected)


@on_each_rank("world4")
def test_tied_replicas_add_up_the_gradients_of_steps() -> None:
    """DDP's gradients are its buckets, which the next step fills."""
    whole = cases.gpt(2, tied=True)
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    _, pipe, x = of_two(tied=True)
    for targets, zeros in [((1, 2), False), ((3,), False), ((4,), True), ((5, 6), True)]:
        whole.zero_grad(set_to_none=not zeros)
        pipe.zero_grad(set_to_none=not zeros)
        for more in targets:
            cases.tokens_loss(whole(tokens()), (tokens() + more) % 11).backward()
            pipe.step(x, (x + more) % 11)
        for name, p in pipe.module.named_parameters():
            assert (p.grad - wanted[name].grad).abs().max() < 1e-9


@pytest.mark.parametrize("kind", [DDP, ZeRO3])
@on_each_rank("world4")
def test_the_norm_is_the_same_to_the_bit_where_a_stage_adds_nothing(kind: Any) -> None:
    """A last stage that has but the tied weight, or, in ZeRO3, nothing to train."""
    torch.manual_seed(0)
    first, last = (nn.Linear(3, 3, bias=False).double() for _ in range(2))
    if kind is DDP:
        last.weight = first.weight
    last.requires_grad_(kind is DDP)
    mesh = Mesh(pp=2, dp=2)
    stages = [nn.Sequential(first, nn.Tanh(), nn.Linear(3, 3).double()), last]
    pipe = Pipeline(stages, mesh.pp, "1f1b", 2, F.mse_loss, wrap=partial(kind, comm=mesh.dp))
    pipe.step(torch.ones(4, 3).double(), torch.ones(4, 3).double())
    assert len(set(Comm().all_gather_object(clip_grad_norm(pipe, 0.01).item()))) == 1
