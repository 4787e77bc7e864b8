"""Tensor-parallel models under data-parallel strategies, and the marks of their parameters."""

import copy
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from labkit import DDP, Comm, Mesh, NaiveDDP, ZeRO3, ZeroOptimizer, full_state_dict
from labkit.parallel.common import ownership
from labkit.parallel.common.clipping import comms_of
from labkit.parallel.common.ownership import claim, marks_of
from labkit.parallel.common.shards import CopiedMark, Shard, mark_shard, marked_as, shard_of
from labkit.parallel.context.context_parallel import SequenceParts
from pipeline_cases import without_collector
from shard_cases import STRATEGIES, alone, built, cut, fresh, train, whole_of
from small_models import difference
from tables import raises
from test_faults_copies import saved
from worlds import on_each_rank

AGREE = 1e-10


@dataclass(frozen=True)
class Ranks:
    """As much of a Comm as a mark is asked for."""

    ranks: tuple[int, ...]
    rank = 0

    @property
    def size(self) -> int:
        return len(self.ranks)


def layer(*ranks: int) -> tuple[nn.Linear, Shard]:
    module, shard = nn.Linear(3, 4), Shard(Ranks(ranks), 0, 4, 7, 8)
    mark_shard(module.weight, shard)
    return module, shard


def test_a_mark_stays_where_a_parameter_changes() -> None:
    module, shard = layer(0, 1)
    assert shard_of(module.weight) is shard and shard_of(module.bias) is None
    module.double()
    module.weight.data = torch.zeros(2, 3)
    module.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(4)})
    assert shard_of(module.weight) is shard


def test_a_mark_keeps_no_parameter_alive() -> None:
    module, _ = layer(0, 1)
    gone = weakref.ref(module.weight)
    with without_collector():
        del module
        assert gone() is None


TRAVELS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": saved,
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("how", TRAVELS)
def test_a_marked_model_travels_with_its_marks_and_what_is_tied(how: str) -> None:
    (module, shard), other = layer(0, 1), nn.Linear(3, 4)
    other.weight = module.weight
    other.bias.requires_grad_(False)
    for parameter in (other.bias, module.weight):
        SequenceParts(shard.comm).attach_to(parameter)
    both, owner = nn.ModuleList([module, other]), nn.Identity()
    if how != "deepcopy":
        claim(both.named_parameters(), owner)
    for _ in range(2):  # and what travelled can travel on
        before, both = both, TRAVELS[how](both)
        assert both[0].weight is not before[0].weight
    one, two = both
    assert one.weight is two.weight and type(one.weight) is nn.Parameter
    assert torch.equal(one.weight, module.weight)
    assert one.weight.requires_grad and not two.bias.requires_grad
    sequence = SequenceParts(shard.comm)
    assert marks_of(one.weight) == [shard, sequence] and shard_of(one.weight) == shard
    assert marks_of(two.bias) == [sequence] and shard_of(two.bias) is None
    assert marks_of(one.bias) == []
    claim(both.named_parameters(), owner)


@dataclass(frozen=True)
class Expert(CopiedMark):
    """A third kind, of a strategy that is yet to be written."""

    comm: Ranks
    name = "_labkit_expert"

    def __str__(self) -> str:
        return "an expert's"

    def check(self, name: str, comm: Any, averaged: bool) -> None:
        if averaged and comm != self.comm:
            raise ValueError(f"{name} is of an expert over ranks {self.comm.ranks}")


def test_a_mark_of_a_third_kind_is_checked_described_and_copied_as_the_others() -> None:
    module, shard = layer(2, 3)
    sequence, expert = SequenceParts(Ranks((2, 3))), Expert(Ranks((0, 1)))
    for mark in (expert, sequence):
        mark.attach_to(module.weight)
    described = "w [4, 3] float32, 4:7 of 8 along dim 0, an expert's"
    for weight in (module.weight, copy.deepcopy(module.weight), saved(module).weight):
        assert marks_of(weight) == [shard, sequence, expert]
        assert marked_as(weight, piece := torch.zeros(5)) is piece
        assert marks_of(piece) == [shard, sequence, expert]
        assert ownership._describe("w", weight) == described
    assert marks_of(marked_as(module.bias, torch.zeros(2))) == []
    expert.attach_to(module.bias)
    words = "bias is of an expert over ranks (0, 1)"
    raises((words,), ownership.check_same_on_all_ranks, [("bias", module.bias)], Ranks((0,)))


def test_all_that_share_a_sequence_are_to_be_averaged() -> None:
    mark = SequenceParts(Ranks((0, 1)))
    for ranks in ((0,), (0, 2), (1, 2, 3)):
        words = r'ranks \[0, 1\] use .*bias on parts of .*mesh\["dp", "cp"\]'
        raises(words, mark.check, "bias", Ranks(ranks), averaged=True)
    mark.check("bias", Ranks((0, 1, 4, 5)), averaged=True)


def test_the_groups_of_some_parameters_come_once_and_in_order() -> None:
    (one, _), (two, _), (same, _) = layer(0, 1), layer(0, 2), layer(0, 1)
    found = comms_of([one.bias, one.weight, two.weight, same.weight])
    assert [comm.ranks for comm in found] == [(0, 1), (0, 2)]


def test_a_mark_that_cannot_be_is_refused() -> None:
    comm: Comm = Ranks((0, 1))
    for dim, start, stop, whole in [(0, 3, 2, 4), (0, 0, 5, 4), (-1, 0, 2, 4), (0, -1, 2, 4)]:
        raises("0 <= start <= stop <= whole", Shard, comm, dim, start, stop, whole)
    for shard in (Shard(comm, 0, 0, 5, 8), Shard(comm, 2, 0, 1, 8)):
        raises(r"\[4, 3\] cannot hold slice 0:", mark_shard, nn.Linear(3, 4).weight, shard)


def test_ranks_with_different_shards_are_not_replicas() -> None:
    _, shard = layer(0, 1)
    words = r"weight is sharded over ranks \[0, 1\].*DDP\(model, mesh.dp"
    raises(words, shard.check, "weight", Ranks((0, 1, 2)), averaged=True)
    shard.check("weight", Ranks((0, 2)), averaged=True)


@on_each_rank("world4")
def test_a_strategy_over_the_tensor_ranks_is_refused() -> None:
    def zero(model: nn.Module, comm: Comm | None) -> ZeroOptimizer:
        return ZeroOptimizer(model.parameters(), torch.optim.SGD, comm=comm, lr=1)

    mesh = Mesh(dp=2, tp=2)
    for comm in (None, mesh.tp):
        for strategy in (DDP, NaiveDDP, ZeRO3, zero):
            raises("is sharded over ranks", strategy, cut(fresh(), mesh.tp), comm)


@on_each_rank("world2")
def test_replicas_with_other_parts_are_found() -> None:
    rank, module = Comm().rank, nn.Linear(3, 4)
    mark_shard(module.weight, Shard(Ranks((rank,)), 0, 4 * rank, 4 * rank + 4, 8))
    raises("0:4 of 8 along dim 0 on rank 0 and .*4:8 of 8", DDP, module)


def check_as_single(strategy: str, axes: dict[str, int]) -> None:
    """Three steps from the whole state, under plain names, with the weights of one process."""
    mesh = Mesh(**axes)
    model, optimizer = built(strategy, mesh)
    single, single_optimizer = alone()
    start = full_state_dict(model)
    assert list(start) == list(single.state_dict())
    assert difference(start, single.state_dict()) == 0
    assert start["rows.weight"] is start["cuts.weight"], "a tied one is put together once"
    train(model, optimizer, mesh.dp, range(3))
    train(single, single_optimizer, None, range(3))
    assert difference(whole_of(model), single.state_dict()) < AGREE


SHARDED = [name for name in STRATEGIES if name != "plain"]


@pytest.mark.parametrize(
    ("strategy", "dp", "tp"),
    [("plain", 1, 3), *((name, 2, 2) for name in SHARDED),
     *((name, 3, 1) for name in ("ddp", "zero-2", "zero-3"))],
)  # fmt: skip
def test_a_cut_model_trains_as_a_single_process(
    request: Any, strategy: str, dp: int, tp: int
) -> None:
    """A tensor axis of one rank is the same code path."""
    request.getfixturevalue(f"world{dp * tp}").run(check_as_single, strategy, {"dp": dp, "tp": tp})
