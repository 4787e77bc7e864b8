"""Deliberate faults in tensor and sequence parallelism; each must turn its proof red."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit import Comm, World
from labkit.parallel.common.conjugate import (
    all_gather_sequence,
    copy_to_ranks,
    reduce_from_ranks,
    reduce_scatter_sequence,
)
from labkit.parallel.tensor import random_state
from labkit.parallel.tensor import tensor_parallel as tensor
from labkit.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from tensor_contract import check_overlap, check_with_bytes, with_sequence
from test_tensor_dropout import check_masks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=5) as world:
        yield world


def of_kind(model: nn.Module, kind: Any) -> list[Any]:
    return [module for module in model.modules() if type(module) is kind]  # not the head


# ---- tensor parallelism


def f_and_g_swapped(model: nn.Module, comm: Comm) -> nn.Module:
    """The sum is in forward where it belongs to backward, and the other way round."""
    tensor_parallel(model, comm)
    for one in of_kind(model, ColumnParallelLinear):
        one.forward = lambda x, one=one: F.linear(reduce_from_ranks(x, comm), one.weight, one.bias)
    for one in of_kind(model, RowParallelLinear):
        one.forward = lambda x, one=one: copy_to_ranks(F.linear(x, one.weight), comm) + one.bias
    return model


def f_left_out(model: nn.Module, comm: Comm) -> nn.Module:
    """The gradient of the input is a part: forward is right, and the last layer's weights."""
    tensor_parallel(model, comm)
    for one in of_kind(model, ColumnParallelLinear):
        one.forward = lambda x, one=one: F.linear(x, one.weight, one.bias)
    return model


def f_left_out_of_one_layer(model: nn.Module, comm: Comm) -> nn.Module:
    """The first block's MLP: what differs is the gradient of what comes before."""
    tensor_parallel(model, comm)
    up = model.blocks[0].mlp.up  # type: ignore[union-attr, index]
    up.forward = lambda x: F.linear(x, up.weight, up.bias)  # type: ignore[union-attr, arg-type]
    return model


def g_left_out(model: nn.Module, comm: Comm) -> nn.Module:
    tensor_parallel(model, comm)
    for one in of_kind(model, RowParallelLinear):
        one.forward = lambda x, one=one: F.linear(x, one.weight, one.bias)
    return model


def bias_on_every_rank(model: nn.Module, comm: Comm) -> nn.Module:
    tensor_parallel(model, comm)
    for one in of_kind(model, RowParallelLinear):
        one.forward = lambda x, one=one: reduce_from_ranks(F.linear(x, one.weight, one.bias), comm)
    return model


def gradients_averaged(model: nn.Module, comm: Comm) -> nn.Module:
    """As in data parallelism: the sum over ranks, divided by them."""
    tensor_parallel(model, comm)
    for one in of_kind(model, ColumnParallelLinear):
        one.register_full_backward_hook(lambda _, ins, outs: tuple(g / comm.size for g in ins))
    return model


def another_ranks_keys(model: nn.Module, comm: Comm) -> nn.Module:
    """Query heads meet the keys of other heads."""
    tensor_parallel(model, comm)
    with torch.no_grad():
        for block in model.blocks:  # type: ignore[union-attr]
            k = block.attn.k.weight  # type: ignore[union-attr]
            parts = [torch.empty_like(k) for _ in range(comm.size)]
            comm.all_gather(parts, k.detach())
            k.copy_(parts[(comm.rank + 1) % comm.size])
    return model


def three_times_one_input(model: nn.Module, comm: Comm) -> nn.Module:
    """q, k and v send a gradient each: right, and too many bytes."""
    tensor_parallel(model, comm)
    for one in of_kind(model, ColumnParallelLinear):
        one.one_input = None
    return model


def nothing_cut(model: nn.Module, comm: Comm) -> nn.Module:
    """Replicas that do the same: right weights, and nothing is sent."""
    return model


@pytest.mark.parametrize(
    "faulty",
    [
        f_and_g_swapped,
        f_left_out,
        f_left_out_of_one_layer,
        g_left_out,
        bias_on_every_rank,
        gradients_averaged,
        another_ranks_keys,
        three_times_one_input,
        nothing_cut,
    ],
)
def test_faulty_tensor_parallelism(pair: World, faulty: Any) -> None:
    with pytest.raises(AssertionError):
        check_with_bytes(pair, faulty, sequence=False)


# ---- sequence parallelism


def norm_gradients_not_summed(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    for norm in of_kind(model, nn.LayerNorm):
        del norm.forward
    return model


def one_norm_not_summed(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    del model.norm.forward  # type: ignore[union-attr]
    return model


def bias_gradients_not_summed(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    for one in of_kind(model, RowParallelLinear):
        one.forward = lambda x, one=one: (
            reduce_scatter_sequence(F.linear(x, one.weight), comm) + one.bias
        )
    return model


def positions_not_summed(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    table = model.embed.positions  # type: ignore[union-attr]
    table.forward = lambda positions: F.embedding(  # type: ignore[union-attr]
        positions.chunk(comm.size, -1)[comm.rank],
        table.weight,  # type: ignore[union-attr, arg-type]
    )
    return model


def everyone_has_the_first_positions(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    edit = model.embed.positions.forward  # type: ignore[union-attr]
    edit.comm = type("First", (), {"rank": 0, "size": comm.size, "all_reduce": comm.all_reduce})()  # type: ignore[union-attr]
    return model


def gathered_input_kept(model: nn.Module, comm: Comm) -> nn.Module:
    """Not gathered again in backward: right, fewer bytes sent, t times as many held."""
    with_sequence(model, comm)
    for one in of_kind(model, ColumnParallelLinear):
        one.one_input = None
        one.forward = lambda x, one=one: F.linear(
            all_gather_sequence(x, comm), one.weight, one.bias
        )
    return model


def all_reduce_where_a_reduce_scatter_does(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    real = RowParallelLinear.forward

    def forward(x: Tensor, one: RowParallelLinear) -> Tensor:
        one.sequence = False
        y = real(x=x, self=one)
        one.sequence = True
        return y.chunk(comm.size, 1)[comm.rank]

    for one in of_kind(model, RowParallelLinear):
        one.forward = lambda x, one=one: forward(x, one)
    return model


@pytest.mark.parametrize(
    "faulty",
    [
        norm_gradients_not_summed,
        one_norm_not_summed,
        bias_gradients_not_summed,
        positions_not_summed,
        everyone_has_the_first_positions,
        gathered_input_kept,
        all_reduce_where_a_reduce_scatter_does,
    ],
)
def test_faulty_sequence_parallelism(pair: World, faulty: Any) -> None:
    with pytest.raises(AssertionError):
        check_with_bytes(pair, faulty, sequence=True)


# ---- overlap


class WaitsAtOnce(ColumnParallelLinear):
    """The all-reduce is waited for before the weight's gradient is begun."""

    def forward(self, x: Tensor) -> Tensor:
        enter = all_gather_sequence if self.sequence else copy_to_ranks
        return F.linear(enter(x, self.comm), self.weight, self.bias)


@pytest.mark.parametrize("sequence", [False, True])
def test_no_overlap(pair: World, sequence: bool) -> None:
    with pytest.raises(AssertionError):
        check_overlap(pair, sequence, WaitsAtOnce)


# ---- dropout


def parts_agree(put: Callable[..., None]) -> None:
    """All ranks draw for their parts as rank 0 does."""
    real = random_state.own_numbers

    class First:
        def __init__(self, comm: Comm):
            self.rank, self.size = 0, comm.size

    put(random_state, "own_numbers", lambda comm, *xs: real(First(comm), *xs))  # type: ignore[arg-type]


def replicas_differ(put: Callable[..., None]) -> None:
    """A part's numbers are drawn, and the generator is left where they ended."""

    def own_numbers(comm: Comm, *_: Tensor) -> Any:
        torch.manual_seed(comm.rank)
        return nullcontext()

    put(random_state, "own_numbers", own_numbers)


def nothing_is_its_own(put: Callable[..., None]) -> None:
    """Parts draw from the generator that replicas draw from."""
    for name in ("DrawsItsOwn", "DrawsItsOwnBetween"):
        put(tensor, name, lambda module, *_: module.forward)


@pytest.mark.parametrize(
    ("fault", "way"),
    [
        (parts_agree, "tensor"),
        (parts_agree, "sequence"),
        (replicas_differ, "tensor"),  # with a cut sequence, there are only parts
        (nothing_is_its_own, "tensor"),
        (nothing_is_its_own, "sequence"),
    ],
)
def test_faulty_dropout(fault: Any, way: str) -> None:
    def put_on_a_rank() -> None:
        fault(setattr)

    # Without checks, which would find that random states differ before a mask is drawn.
    with World(2, timeout_s=5, check=False) as world, pytest.raises(AssertionError):
        world.run(put_on_a_rank)
        check_masks(world, way)
