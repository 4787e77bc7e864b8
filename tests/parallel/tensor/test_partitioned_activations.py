"""ZeRO-R's P_a: of the inputs that all tensor ranks would keep, each keeps a part."""

from typing import Any

import pytest
import torch
from torch import Tensor

from harness import Mutation, instead, noticed, on_ranks
from labkit import GPT, Batch, Comm, RankError, Recompute, World, full_state_dict, listen, loss
from labkit.memory.peak import PeakMemory
from labkit.parallel.partitioned_activations import Partitioned, partition_activations
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from small_models import difference
from tables import cases, raises
from worlds import on_each_rank

DEPTH, WIDTH, ROWS, LENGTH, STEPS = 3, 12, 5, 14, 3
X = ROWS * LENGTH * WIDTH  # elements; over 3 ranks they are no whole rows


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(64, WIDTH, DEPTH, heads=6, context=16, dropout=0.1).double()


def edited(partitioned: bool) -> Any:
    made = tensor_parallel(model(), Comm(), gather_logits=True)
    Recompute(made)
    return partition_activations(made, Comm()) if partitioned else made


def trained(edited: Any) -> list[float]:
    optimizer, losses = torch.optim.AdamW(edited.parameters(), lr=1e-2), []
    torch.manual_seed(1)
    for _ in range(STEPS):
        x = torch.randint(64, (ROWS, LENGTH))
        optimizer.zero_grad()
        value = loss(edited(x), Batch(x, x, x.numel()))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def with_and_without() -> int:
    """That both train alike; and the elements that a backward gathers beside what both send."""
    losses, weights, sent = [], [], []
    for partitioned in (False, True):
        trains = edited(partitioned)
        with listen() as events:
            losses.append(trained(trains))
        weights.append(full_state_dict(trains))
        sent.append(sum(event.bus_bytes for event in events) / 8 / STEPS)
    assert losses[0] == losses[1] and difference(*weights) == 0
    return round((sent[1] - sent[0]) * Comm().size)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_trains_as_without_and_gathers_each_input_once(worlds: Any, size: int) -> None:
    assert worlds(size).run(with_and_without) == [(size - 1) * DEPTH * X] * size


def kept_bytes(partitioned: bool) -> float:
    """By a forward, on this rank, of the blocks' inputs."""
    forward, x = edited(partitioned), torch.randint(64, (40, LENGTH))
    with PeakMemory() as memory:
        value = forward(x).mean()
        held_bytes = memory.held_bytes
    value.backward()
    return held_bytes


def test_a_rank_keeps_its_part_of_each_input(world2: World):
    nbytes = 40 * LENGTH * WIDTH * 8
    for whole, part in zip(world2.run(kept_bytes, False), world2.run(kept_bytes, True)):
        # The first block's input is the embedding's output, which nobody else keeps either.
        assert whole - part == pytest.approx(DEPTH * nbytes / 2, rel=0.01)


@cases(
    ({}, "selective", "is not sharded over ranks"),  # whose inputs are this rank's heads
    (None, "full", "is not sharded over ranks"),
    ({}, None, "call Recompute"),
    ({"sequence": True}, "full", "sharded along the sequence"),
)
@on_each_rank("world2")
def test_a_model_with_nothing_to_cut_is_refused(options: Any, what: Any, words: str) -> None:
    edited: Any = model()
    if options is not None:
        tensor_parallel(edited, Comm(), **options)
    if what is not None:
        Recompute(edited, what=what)
    raises((words,), partition_activations, edited, Comm())


def keeps_all(self: Partitioned, x: Tensor) -> Tensor:
    return x.detach()


def keeps_the_first(self: Partitioned, x: Tensor) -> Any:
    parts = x.detach().reshape(-1).tensor_split(self.comm.size)
    return parts[0].clone(), x.shape


def gathers_each_input_once() -> None:
    assert with_and_without() == DEPTH * X


test_a_fault_is_found = pytest.mark.slow(
    noticed(
        [Mutation(instead(fault.__name__, Partitioned, "pack", fault), gathers_each_input_once)
         for fault in (keeps_all, keeps_the_first)],
        on_ranks, RankError, match="AssertionError", size=2,
    )
)  # fmt: skip
