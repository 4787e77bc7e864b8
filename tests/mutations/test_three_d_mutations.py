"""Deliberate faults in what joins the three dimensions; each must turn the checks red."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest

import three_d_cases as cases
from labkit import DDP, Comm, GradScaler, RankError, World
from labkit.parallel.common import agreement, clipping
from labkit.parallel.pipeline import pipeline
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.pipeline.tied import Tied
from labkit.parallel.pipeline.virtual_stage import VirtualStage
from labkit.parallel.zero.zero import ZeroOptimizer
from three_d_cases import Case

pytestmark = pytest.mark.slow
DEEP = Case(2, 2, 1)
FLAT = Case(2, 1, 2, tied=False)


@pytest.fixture(scope="module")
def eight() -> Iterator[World]:
    with World(8, timeout_s=20) as world:
        yield world


def forgets_the_embedding_group() -> Any:
    return patch.object(Tied, "sum_gradients", lambda self: None)


def sums_the_embedding_over_one_rank() -> Any:
    """As a group that has but this rank."""

    def sum_gradients(self: Any) -> None:
        for gradient, group in self._gradients:
            with patch.object(type(group), "all_reduce", lambda self, x, *_: None):
                gradient.sum_copies(group)

    return patch.object(Tied, "sum_gradients", sum_gradients)


def counts_tied_ones_twice() -> Any:
    return patch.object(Pipeline, "counts_here", lambda self, parameter: True)


def counts_replicated_ones_on_each_rank() -> Any:
    """Norms and biases as if they were shards over tp."""
    return patch.object(clipping, "_is_cut_over", lambda group, x: group is not None)


def counts_its_own_stage() -> Any:
    return patch.object(clipping, "pipeline_of", lambda trained, parameters: None)


@contextmanager
def decides_by_its_own_stage() -> Iterator[None]:
    def scaler(*args: Any, comm: Comm, **how: Any) -> GradScaler:
        mesh = cases.mesh_of(FLAT.pp, FLAT.dp, FLAT.tp)
        return GradScaler(*args, comm=mesh.tp, **how)

    with ExitStack() as stack:
        stack.enter_context(patch.object(cases, "GradScaler", scaler))
        stack.enter_context(patch.object(pipeline, "check_scaler", lambda *_: None))
        yield


def averages_in_every_micro_batch() -> Any:
    return patch.object(VirtualStage, "_without_sync", lambda self, action: nullcontext())


def sends_in_every_micro_batch() -> Any:
    return patch.object(Pipeline, "_without_sync", lambda self, action: nullcontext())


@contextmanager
def averages_over_the_wrong_ranks() -> Iterator[None]:
    """Over tp, too, where the shards are others; that it is refused is switched off."""
    mesh = cases.mesh_of(2, 2, 2)

    with ExitStack() as stack:
        stack.enter_context(patch.object(agreement, "check_replicas", lambda *_: None))
        stack.enter_context(patch.object(agreement, "_described", lambda name, x: name))
        both = mesh["dp", "tp"]
        stack.enter_context(patch.object(cases, "DDP", lambda stage, comm: DDP(stage, both)))
        yield


def averages_over_nobody() -> Any:
    return patch.object(cases, "DDP", lambda stage, comm: stage)


def takes_all_replicas_for_equal() -> Any:
    """Of 7 rows one has 4 and the other 3."""
    return patch.object(cases.Batch, "share", 1.0)


def scales_the_loss_of_one_micro_batch() -> Any:
    real = Pipeline._loss_of

    def loss_of(self: Any, output: Any, k: int) -> Any:
        value = real(self, output, k)
        return value if k or self._scaler is None else value / self._scaler.get_scale()

    return patch.object(Pipeline, "_loss_of", loss_of)


def cuts_ties_where_they_fall() -> Any:
    """A tied embedding in a bucket with others: its owners have other elements of it."""
    from labkit.parallel.zero import zero

    with ExitStack() as stack:
        stack.enter_context(patch.object(zero, "tied_with", lambda p: ()))
        stack.enter_context(
            patch.object(ZeroOptimizer, "gradient_of_copy", lambda self, p: self._bucket_of[p])
        )
        return stack.pop_all()


def sends_it_whole_from_each_rank() -> Any:
    return patch.object(pipeline, "scatter_gather_over", lambda *_: None)


FAULTS: list[tuple[Callable[[], AbstractContextManager[Any]], Case, str]] = [
    (forgets_the_embedding_group, DEEP, "norm of step|is off by"),
    (forgets_the_embedding_group, Case(2, 2, 1, "zero-1"), "norm of step|is off by"),
    (sums_the_embedding_over_one_rank, DEEP, "norm of step|is off by"),
    (cuts_ties_where_they_fall, Case(2, 2, 1, "zero-1"), "ranks disagree about collective"),
    (counts_tied_ones_twice, DEEP, "norm of step"),
    (counts_tied_ones_twice, Case(2, 2, 1, "zero-1"), "norm of step"),
    (counts_replicated_ones_on_each_rank, Case(1, 2, 2), "norm of step"),
    (counts_its_own_stage, DEEP, "norm of step"),
    (decides_by_its_own_stage, FLAT, "scales"),
    (averages_in_every_micro_batch, DEEP, "data .* bytes, not"),
    (sends_in_every_micro_batch, Case(2, 2, 1, "zero-1"), "data .* bytes, not"),
    (averages_over_the_wrong_ranks, Case(), "losses|norm of step|is off by"),
    (sends_it_whole_from_each_rank, Case(2, 1, 2, scatter_gather=True), "tensor .* bytes, not"),
    (averages_over_nobody, DEEP, "losses|norm of step|is off by"),
    (takes_all_replicas_for_equal, Case(2, 2, 1, rows=7), "losses|norm of step|is off by"),
    (scales_the_loss_of_one_micro_batch, DEEP, "norm of step|is off by"),
]


@pytest.mark.parametrize(
    ("fault", "case", "told"), FAULTS, ids=[f"{one.__name__}, {case}" for one, case, _ in FAULTS]
)
def test_a_fault_is_found(eight: World, fault: Any, case: Case, told: str) -> None:
    with pytest.raises((AssertionError, RankError), match=told):
        cases.check(case, eight.run(lambda: cases.train(case, fault)))
