"""Deliberate faults in tensor and sequence parallelism; each must turn its check red."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Mutation, around, edits, given, noticed
from labkit import Comm
from labkit.parallel.common.conjugate import all_gather_sequence, copy_to_ranks, reduce_from_ranks
from labkit.parallel.tensor import layers
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


def f_left_out_of_one_layer(model: nn.Module, comm: Comm) -> nn.Module:
    """The first block's MLP: what differs is the gradient of what comes before."""
    tensor_parallel(model, comm)
    up: Any = model.blocks[0].mlp.up
    up.forward = partial(local, up)
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


def nothing_cut(model: nn.Module, comm: Comm) -> nn.Module:
    """Identical replicas: right weights, and nothing is sent."""
    return model


def one_norm_not_summed(model: nn.Module, comm: Comm) -> nn.Module:
    with_sequence(model, comm)
    del model.norm.forward
    return model


def gathered_input_kept(model: nn.Module, comm: Comm) -> nn.Module:
    """Not gathered again in backward: right, fewer bytes sent, t times as many held."""
    with_sequence(model, comm)
    for layer in of_kind(model, ColumnParallelLinear):
        layer.shared_input = None
    return with_forward(
        model, ColumnParallelLinear, lambda layer, x: local(layer, all_gather_sequence(x, comm))
    )


PARTIAL = check_with_bytes, tensor_parallel, False
SHARDED = check_with_bytes, with_sequence, True
F_BACKWARD = "reduction = comm.all_reduce(dx, async_op=True)"
G = "(reduce_scatter_sequence if self.sequence else reduce_from_ranks)(summand, self.comm)"
COPIES = "copies_to_ranks([*present.values()], self.comm)"
FAULTS = edits(
    layers,
    ("f is left out",  # partial gradients of the input; forward is right
     "elif comm.size > 1:", "elif False:", *PARTIAL),
    ("g is left out", G, "summand", *PARTIAL),
    ("the bias is added on every rank",
     "y + bias.to(y.dtype)", "y + self.comm.size * bias.to(y.dtype)", *PARTIAL),
    ("gradients are averaged",
     F_BACKWARD, 'reduction = comm.all_reduce(dx, "mean", async_op=True)', *PARTIAL),
    ("q, k and v each send a gradient",  # right, but too many bytes
     "if self.shared_input is not None:", "if False:", *PARTIAL),
    ("gradients of norms are not summed",
     COPIES, f"{COPIES} if isinstance(self.module, nn.Embedding) else present.values()", *SHARDED),
    ("positions are not summed",
     COPIES, f"present.values() if isinstance(self.module, nn.Embedding) else {COPIES}", *SHARDED),
    ("every rank has the first positions",
     "own_part(positions, self.comm, dim=-1)", "positions.chunk(self.comm.size, -1)[0]", *SHARDED),
    ("gradients of biases are not summed",
     "copy_to_ranks(self.bias, self.comm) if self.sequence", "self.bias if True", *SHARDED),
    ("an all-reduce where a reduce-scatter does",
     G, "reduce_from_ranks(summand, self.comm).chunk(self.comm.size, 1)[self.comm.rank]", *SHARDED),
    ("the all-reduce is waited for before the weight's gradient is begun",
     F_BACKWARD, "comm.all_reduce(dx)", check_overlap, False),
    ("the reduce-scatter is waited for before the weight's gradient is begun",
     "sum_scattered(dx, comm, dim=1, async_op=True)", "sum_scattered(dx, comm, dim=1)",
     check_overlap, True),
)  # fmt: skip
FAULTY_MODELS = [
    Mutation(faulty, check_with_bytes, faulty in (one_norm_not_summed, gathered_input_kept))
    for faulty in (f_and_g_swapped, f_left_out_of_one_layer, another_ranks_keys, nothing_cut,
                   one_norm_not_summed, gathered_input_kept)
]  # fmt: skip
MASKS = [(check_masks, way) for way in ("tensor", "sequence")]
RANDOM_NUMBERS = [
    *edits(
        tensor,
        *(("ranks draw the same", " + comm.rank\n", "\n", *masks) for masks in MASKS),
        *(("shards share the generator",
           "self._own is None and validation.has_dropout(self.module)", "False", *masks)
          for masks in MASKS),
        ("replicas differ",  # the generator is left where the numbers of a shard ended
         "with torch.random.fork_rng(range(len(generators()) - 1)):\n        for",
         "if True:\n        for", *MASKS[0]),
    ),
]  # fmt: skip

pair = {"size": 2, "timeout_s": 5}
test_a_fault_turns_its_check_red = noticed(FAULTS, around, AssertionError, **pair)
test_a_faulty_model_turns_the_check_red = noticed(FAULTY_MODELS, given, AssertionError, **pair)
# Without checks, which would find that random states differ before a mask is drawn.
test_faulty_dropout_turns_its_check_red = noticed(
    RANDOM_NUMBERS, around, AssertionError, check=False, **pair
)
