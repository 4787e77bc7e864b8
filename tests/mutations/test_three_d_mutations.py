"""Deliberate faults in what joins the three dimensions; each must turn the checks red."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

import three_d_cases as cases
from harness import Change, Edit, Mutation, instead, noticed, on_ranks
from labkit import DDP, Comm, GradScaler, World
from labkit.parallel.common import clipping, ownership
from labkit.parallel.common.shards import Shard
from labkit.parallel.pipeline import grad_sync, pipeline
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.zero import zero
from labkit.parallel.zero.zero import ZeroOptimizer
from test_pipeline_mutations import never_sums_the_tie, synchronises_on_every_micro_batch
from three_d_cases import Case

pytestmark = pytest.mark.slow
DEEP = Case(2, 2, 1)
FLAT = Case(2, 1, 2, tied=False)


counts_tied_parameters_twice = instead(
    "counts_tied_parameters_twice", Pipeline, "counts_here", lambda self, parameter: True
)
# Norms and biases as if they were shards over tp.
counts_replicated_parameters_on_each_rank = instead(
    "counts_replicated_parameters_on_each_rank",
    clipping, "_is_sharded_over", lambda group, x: group is not None,
)  # fmt: skip
counts_its_own_stage = instead(
    "counts_its_own_stage", clipping, "pipeline_of", lambda trained, parameters: None
)


@contextmanager
def decides_by_its_own_stage() -> Iterator[None]:
    def scaler(*args: Any, comm: Comm, **how: Any) -> GradScaler:
        mesh = cases.mesh_of(FLAT.pp, FLAT.dp, FLAT.tp)
        return GradScaler(*args, comm=mesh.tp, **how)

    with (
        patch.object(cases, "GradScaler", scaler),
        patch.object(pipeline.validation, "check_scaler", lambda *_: None),
    ):
        yield


@contextmanager
def averages_over_the_wrong_ranks() -> Iterator[None]:
    """Over tp, too, where the shards are others; that it is refused is switched off."""
    both = cases.mesh_of(2, 2, 2)["dp", "tp"]
    with (
        patch.object(Shard, "check", lambda *_: None),
        patch.object(ownership, "_describe", lambda name, x: name),
        patch.object(cases, "wrapped", lambda _, stage, **options: DDP(stage, both)),
    ):
        yield


never_averages = instead("never_averages", cases, "wrapped", lambda _, stage, **options: stage)
# Of 7 rows one has 4 and the other 3.
weighs_all_replicas_alike = instead("weighs_all_replicas_alike", cases.Batch, "share", 1.0)


@contextmanager
def cuts_ties_where_they_fall() -> Iterator[None]:
    """A tied embedding in a bucket with others: its owners have other elements of it."""
    with (
        patch.object(zero, "is_tied", lambda p: False),
        patch.object(ZeroOptimizer, "gradient_of_copy", lambda self, p: self._bucket_of[p]),
    ):
        yield


def trains(world: World, change: Change, check: Any, case: Case) -> None:
    check(case, on_ranks(world, change, cases.train, case))


sums_the_embedding_over_one_rank = Edit(
    "sums_the_embedding_over_one_rank",
    grad_sync.__name__, "group.all_reduce(parameter.grad)", "pass",
)  # fmt: skip
sends_in_every_micro_batch = Edit(
    "sends_in_every_micro_batch",
    pipeline.__name__, "self._send_once if action != self._last_backward else ()", "()",
)  # fmt: skip
scales_not_the_first_micro_batch = Edit(
    "scales_not_the_first_micro_batch",
    pipeline.__name__, "share if self._scaler is None", "share if k == 0 or self._scaler is None",
)  # fmt: skip
sends_whole_activations_from_each_rank = Edit(
    "sends_whole_activations_from_each_rank",
    pipeline.__name__, "scatter_gather_over(scatter_gather, comm, modules)", "None",
)  # fmt: skip
NUMBERS, TENSOR = "losses|norm of step|is off by", "tensor .* bytes, not"
ZERO_1 = Case(2, 2, 1, "zero-1")
FAULTS = [
    Mutation(fault, cases.check, case, match=match)
    for fault, case, match in (
        (never_sums_the_tie, DEEP, "norm of step|is off by"),
        (never_sums_the_tie, ZERO_1, "norm of step|is off by"),
        (sums_the_embedding_over_one_rank, DEEP, "norm of step|is off by"),
        (cuts_ties_where_they_fall, ZERO_1, "ranks disagree about collective"),
        (counts_tied_parameters_twice, DEEP, "norm of step"),
        (counts_tied_parameters_twice, ZERO_1, "norm of step"),
        (counts_replicated_parameters_on_each_rank, Case(1, 2, 2), "norm of step"),
        (counts_its_own_stage, DEEP, "norm of step"),
        (decides_by_its_own_stage, FLAT, "scales"),
        (synchronises_on_every_micro_batch, DEEP, "data .* bytes, not"),
        (sends_in_every_micro_batch, ZERO_1, "data .* bytes, not"),
        (averages_over_the_wrong_ranks, Case(), NUMBERS),
        (sends_whole_activations_from_each_rank, Case(2, 1, 2, scatter_gather=True), TENSOR),
        (never_averages, DEEP, NUMBERS),
        (weighs_all_replicas_alike, Case(2, 2, 1, rows=7), NUMBERS),
        (scales_not_the_first_micro_batch, DEEP, "norm of step|is off by"),
    )
]
test_a_fault_turns_its_check_red = noticed(FAULTS, trains, size=8, timeout_s=20)
