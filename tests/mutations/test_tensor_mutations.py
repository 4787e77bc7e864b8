"""Deliberate faults in tensor and sequence parallelism; each must turn its check red."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Mutation, around, given, instead, noticed, replaces
from labkit import Comm, World
from labkit.parallel.common.conjugate import (
    all_gather_sequence,
    copy_to_ranks,
    reduce_from_ranks,
    reduce_scatter_sequence,
)
from labkit.parallel.tensor import tensor_parallel as tensor
from labkit.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from tensor_contract import check_overlap, check_with_bytes, with_sequence
from test_tensor_dropout import check_masks

pytestmark = pytest.mark.slow


def of_kind(model: nn.Module, kind: Any) -> list[Any]:
    return [module for module in model.modules() if type(module) is kind]  # not the head


def with_forward(model: nn.Module, kind: Any, forward: Callable[..., Tensor]) -> nn.Module:
    for layer in of_kind(model, kind):
        layer.forward = partial(forward, layer)
    return model


def local(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def f_and_g_swapped(model: nn.Module, comm: Comm) -> nn.Module:
    """The sum is in forward where it belongs to backward, and the other way round."""
    tensor_parallel(model, comm)
    with_forward(
        model, ColumnParallelLinear, lambda layer, x: local(layer, reduce_from_ranks(x, comm))
    )
    return with_forward(
        model,
        RowParallelLinear,
        lambda layer, x: copy_to_ranks(F.linear(x, layer.weight), comm) + layer.bias,
    )


def f_left_out(model: nn.Module, comm: Comm) -> nn.Module:
    """The gradient of the input is partial: forward is right, and the last layer's weights."""
    return with_forward(tensor_parallel(model, comm), ColumnParallelLinear, local)


def f_left_out_of_one_layer(model: nn.Module, comm: Comm) -> nn.Module:
    """The first block's MLP: what differs is the gradient of what comes before."""
    tensor_parallel(model, comm)
    up: Any = model.blocks[0].mlp.up
    up.forward = partial(local, up)
    return model


def g_left_out(model: nn.Module, comm: Comm) -> nn.Module:
    return with_forward(tensor_parallel(model, comm), RowParallelLinear, local)


def bias_on_every_rank(model: nn.Module, comm: Comm) -> nn.Module:
    return with_forward(
        tensor_parallel(model, comm),
        RowParallelLinear,
        lambda layer, x: reduce_from_ranks(local(layer, x), comm),
    )


def gradients_averaged(model: nn.Module, comm: Comm) -> nn.Module:
    """As in data parallelism: the sum over ranks, divided by their number."""
    tensor_parallel(model, comm)
    for layer in of_kind(model, ColumnParallelLinear):
        layer.register_full_backward_hook(lambda _, ins, outs: tuple(g / comm.size for g in ins))
    return model


def another_ranks_keys(model: nn.Module, comm: Comm) -> nn.Module:
    """Query heads meet the keys of other heads."""
    tensor_parallel(model, comm)
    with torch.no_grad():
        for block in model.blocks:
            k = block.attn.k.weight
            parts = [torch.empty_like(k) for _ in range(comm.size)]
            comm.all_gather(parts, k.detach())
            k.copy_(parts[(comm.rank + 1) % comm.size])
    return model


def three_times_one_input(model: nn.Module, comm: Comm) -> nn.Module:
    """q, k and v each send a gradient: right, but too many bytes."""
    tensor_parallel(model, comm)
    for layer in of_kind(model, ColumnParallelLinear):
        layer.one_input = None
    return model


def nothing_cut(model: nn.Module, comm: Comm) -> nn.Module:
    """Identical replicas: right weights, and nothing is sent."""
    return model


FAULTS = [
    Mutation(faulty, check_with_bytes, sequence=False)
    for faulty in (f_and_g_swapped, f_left_out, f_left_out_of_one_layer, g_left_out,
                   bias_on_every_rank, gradients_averaged, another_ranks_keys,
                   three_times_one_input, nothing_cut)
]  # fmt: skip


def norm_gradients_not_summed(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    for norm in of_kind(model, nn.LayerNorm):
        del norm.forward
    return model


def one_norm_not_summed(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    del model.norm.forward
    return model


def bias_gradients_not_summed(model: nn.Module, comm: Comm) -> nn.Module:
    return with_forward(
        with_sequence(model, comm),
        RowParallelLinear,
        lambda layer, x: reduce_scatter_sequence(F.linear(x, layer.weight), comm) + layer.bias,
    )


def positions_not_summed(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    table = model.embed.positions
    table.forward = lambda positions: F.embedding(
        positions.chunk(comm.size, -1)[comm.rank], table.weight
    )
    return model


def every_rank_has_the_first_positions(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    edit = model.embed.positions.forward
    edit.comm = type("First", (), {"rank": 0, "size": comm.size, "all_reduce": comm.all_reduce})()
    return model


def gathered_input_kept(model: nn.Module, comm: Comm) -> nn.Module:
    """Not gathered again in backward: right, fewer bytes sent, t times as many held."""
    with_sequence(model, comm)
    for layer in of_kind(model, ColumnParallelLinear):
        layer.one_input = None
    return with_forward(
        model, ColumnParallelLinear, lambda layer, x: local(layer, all_gather_sequence(x, comm))
    )


def all_reduce_where_a_reduce_scatter_does(model: nn.Module, comm: Comm) -> nn.Module:
    real = RowParallelLinear.forward

    def forward(layer: Any, x: Tensor) -> Tensor:
        layer.sequence = False
        y = real(layer, x)
        layer.sequence = True
        return y.chunk(comm.size, 1)[comm.rank]

    return with_forward(with_sequence(model, comm), RowParallelLinear, forward)


FAULTS += [
    Mutation(faulty, check_with_bytes, sequence=True)
    for faulty in (norm_gradients_not_summed, one_norm_not_summed, bias_gradients_not_summed,
                   positions_not_summed, every_rank_has_the_first_positions,
                   gathered_input_kept, all_reduce_where_a_reduce_scatter_does)
]  # fmt: skip


class WaitsAtOnce(ColumnParallelLinear):
    """The all-reduce is waited for before the weight's gradient is begun."""

    def forward(self, x: Tensor) -> Tensor:
        enter = all_gather_sequence if self.sequence else copy_to_ranks
        return F.linear(enter(x, self.comm), self.weight, self.bias)


def overlaps(world: World, faulty: Any, sequence: bool) -> None:
    check_overlap(world, sequence, faulty)


FAULTS += [Mutation(WaitsAtOnce, overlaps, sequence) for sequence in (False, True)]
pair = {"size": 2, "timeout_s": 5}
test_a_fault_turns_its_check_red = noticed(FAULTS, given, AssertionError, **pair)


@replaces(tensor, "own_numbers")
def ranks_draw_the_same(real: Any, comm: Comm, *xs: Any) -> Any:
    """All ranks draw for their shards as rank 0 does."""
    return real(SimpleNamespace(rank=0, size=comm.size), *xs)


@replaces(tensor, "own_numbers")
def replicas_differ(real: Any, comm: Comm, *_: Tensor) -> Any:
    """A shard's numbers are drawn, and the generator is left where they ended."""
    torch.manual_seed(comm.rank)
    return nullcontext()


# Shards draw from the generator that replicas draw from.
shards_share_the_generator = instead(
    "shards_share_the_generator", tensor.OwnForward, "_begin", lambda _: None
)


DROPOUT = [
    Mutation(fault, check_masks, way)
    for fault in (ranks_draw_the_same, replicas_differ, shards_share_the_generator)
    for way in ("tensor", "sequence")
    if fault is not replicas_differ or way == "tensor"  # else there are only shards
]
# Without checks, which would find that random states differ before a mask is drawn.
test_faulty_dropout_turns_its_check_red = noticed(
    DROPOUT, around, AssertionError, check=False, **pair
)
