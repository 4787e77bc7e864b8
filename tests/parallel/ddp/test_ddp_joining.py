"""Ranks whose data ends early: nobody hangs, and the weights are those of a single process."""

from typing import Any

import pytest
import torch
from torch import nn

import ddp_checks
from labkit import DDP, Comm, RankError, World, listen
from labkit.parallel.ddp.comm_hooks import compressed
from small_models import difference
from tables import cases, raises
from worlds import on_each_rank


@cases(
    ([2, 4, 5], False, {}),
    ([2, 4, 5], True, {}),
    ([0, 1, 3], True, {"static_graph": True}),
    ([3, 1, 1], False, {"overlap": False, "hook": compressed(torch.float64)}),
    ([2, 2, 2], False, {}),
)
@on_each_rank("world3")
def test_weights_equal_one_process(steps: list[int], divide_by_active: bool, how: Any) -> None:
    ddp_checks.ranks_whose_data_ends_join(DDP, steps, divide_by_active, **how)


@on_each_rank("world3")
def test_buffers_and_evaluations_and_accumulation_inside_join() -> None:
    """Rank 0 ends first: from then on, the buffers are those of the next active rank."""
    rank = Comm().rank
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = DDP(module)
    with model.join():
        for _ in range(1 + rank):
            for x in model.accumulate(torch.randn(2, 5, 3)):
                model(x).sum().backward()
            model(torch.randn(5, 3))  # a forward alone
            with torch.no_grad():
                model(torch.randn(5, 3))
    assert int(module[1].num_batches_tracked) == 3 * 4
    state = module.state_dict()
    assert all(difference(other, state) == 0 for other in Comm().all_gather_object(state))


@on_each_rank("world3")
def test_ranks_that_end_together_send_a_number_each_more() -> None:
    model = DDP(nn.Linear(2, 1, bias=False))
    with listen() as events, model.join():
        model(torch.ones(1, 2)).sum().backward()
    sent = [(event.op, event.payload_bytes) for event in events]
    assert sent == [("all_reduce", 12), ("all_reduce", 8), ("all_reduce", 12)]


@on_each_rank("world3")
def test_after_join_training_goes_on_and_an_error_inside_ends_it() -> None:
    module = nn.Linear(2, 1, bias=False)
    model = DDP(module)
    with pytest.raises(KeyError), model.join():
        raise KeyError("on purpose")
    with model.join(divide_by_active=True):
        pass
    model(torch.full((1, 2), Comm().rank + 1.0)).sum().backward()
    assert module.weight.grad[0].tolist() == [2.0, 2.0]


@on_each_rank("world3")
def test_ranks_in_different_operations_are_reported() -> None:
    model = DDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    words = "rank 0 is in backward, rank 1 is in forward, rank 2 is in backward"
    with pytest.raises(ValueError, match=words), model.join():
        y = model(torch.ones(5, 3))
        if Comm().rank == 1:
            model(torch.ones(5, 3))
        else:
            y.sum().backward()


def test_without_join_the_error_names_the_rank_that_has_ended(world3: World) -> None:
    def run() -> None:
        model = DDP(nn.Linear(2, 1))
        for _ in range([2, 4, 5][Comm().rank]):
            model(torch.ones(1, 2)).sum().backward()

    words = "rank 1 waits for rank 0, which returned without calling the operation"
    raises(words, world3.run, run, error=RankError)
