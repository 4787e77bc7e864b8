"""ZeRO-R's P_a: of the inputs that all tensor ranks would keep, each keeps a part."""

from typing import Any

import pytest
import torch
from torch import Tensor

from labkit import GPT, Batch, Comm, RankError, Recompute, World, full_state_dict, listen, loss
from labkit.memory.peak import PeakMemory
from labkit.parallel import partitioned_activations
from labkit.parallel.partitioned_activations import Partitioned, partition_activations
from labkit.parallel.tensor.tensor_parallel import tensor_parallel

DEPTH, WIDTH, ROWS, LENGTH, STEPS = 3, 12, 5, 14, 3
X = ROWS * LENGTH * WIDTH  # elements; over 3 ranks they are no whole rows


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(64, WIDTH, DEPTH, heads=6, context=16, dropout=0.1).double()


def trained(edited: Any) -> list[float]:
    """Losses; the weights are in the model."""
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


def with_and_without() -> tuple[list[float], dict[str, Tensor], int]:
    """That both train alike; and the elements that a backward gathers beside what both send."""
    comm, results, sent = Comm(), [], []
    for partitioned in (False, True):
        edited = tensor_parallel(model(), comm, gather_logits=True)
        Recompute(edited)
        if partitioned:
            partition_activations(edited, comm)
        with listen() as events:
            losses = trained(edited)
        results.append((losses, full_state_dict(edited)))
        sent.append(sum(event.bus_bytes for event in events) / 8 / STEPS)
    (losses, weights), (same_losses, same_weights) = results
    assert losses == same_losses
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    return losses, weights, round((sent[1] - sent[0]) * comm.size)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_trains_to_the_bit_as_without_and_gathers_each_input_once(size: int):
    with World(size) as world:
        for _, _, gathered in world.run(with_and_without):
            assert gathered == (size - 1) * DEPTH * X


def kept_bytes(partitioned: bool) -> float:
    """By a forward, on this rank, of the blocks' inputs."""
    comm = Comm()
    edited = tensor_parallel(model(), comm)
    Recompute(edited)
    if partitioned:
        partition_activations(edited, comm)
    x = torch.randint(64, (40, LENGTH))
    with PeakMemory() as memory:
        value = edited(x).mean()
        held_bytes = memory.held_bytes
    value.backward()
    return held_bytes


def test_a_rank_keeps_its_part_of_each_input(world2: World):
    nbytes = 40 * LENGTH * WIDTH * 8
    for whole, part in zip(world2.run(kept_bytes, False), world2.run(kept_bytes, True)):
        # The first block's input is the embedding's output, which nobody else keeps either.
        assert whole - part == pytest.approx(DEPTH * nbytes / 2, rel=0.01)


def test_what_has_nothing_to_cut_is_refused(world2: World):
    def without_recompute() -> None:
        partition_activations(tensor_parallel(model(), Comm()), Comm())

    def with_sequence() -> None:
        edited = tensor_parallel(model(), Comm(), sequence=True)
        Recompute(edited)
        partition_activations(edited, Comm())

    def with_cores_alone() -> None:
        edited = tensor_parallel(model(), Comm())
        Recompute(edited, what="selective")  # whose inputs are the heads of this rank
        partition_activations(edited, Comm())

    def without_tensor_parallelism() -> None:
        plain = model()
        Recompute(plain)
        partition_activations(plain, Comm())

    for mistaken in (with_cores_alone, without_tensor_parallelism):
        with pytest.raises(RankError, match="is no layer cut over ranks"):
            world2.run(mistaken)
    with pytest.raises(RankError, match="call Recompute"):
        world2.run(without_recompute)
    with pytest.raises(RankError, match="cut along the sequence"):
        world2.run(with_sequence)


# --- faults that must be found -------------------------------------------------------------------


def keeps_all(self: Partitioned, x: Tensor) -> Tensor:
    return x.detach()


def keeps_the_first(self: Partitioned, x: Tensor) -> Any:
    parts = x.detach().reshape(-1).tensor_split(self.comm.size)
    return partitioned_activations.Part(parts[0].clone(), x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [keeps_all, keeps_the_first])
def test_a_fault_is_found(world2: World, fault: Any):
    def gathered() -> int:
        right, Partitioned.keep = Partitioned.keep, fault
        try:
            return with_and_without()[2]
        finally:
            Partitioned.keep = right

    try:
        assert any(count != DEPTH * X for count in world2.run(gathered))
    except RankError as error:
        assert "AssertionError" in str(error)
        world2.restart()
