"""torch's own strategies, to be timed beside labkit's. This file alone imports
torch.distributed outside of the door and of what starts ranks: its peers come from there (when they
are used, for that takes its time and warns of torch's own past).
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

DDP = nn.parallel.DistributedDataParallel


def zero_1(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Its module is in torch's DDP, as it is meant to be."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)


def fsdp2(module: nn.Module) -> nn.Module:
    """Each block by itself, and what is left, as FSDP2's users do."""
    from torch.distributed.fsdp import fully_shard

    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(module)
    return module


def dtensor(module: Any, gather_logits: bool) -> nn.Module:
    """A labkit.GPT over all ranks, by torch's tensor parallelism, tied where it was."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, ParallelStyle] = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(
            output_layouts=Replicate() if gather_logits else Shard(-1),
            use_local_output=gather_logits,
        ),
    }
    for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("attn.out", "mlp.down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    tied = module.head.weight is module.embed.tokens.weight
    module = parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    if tied:  # each was cut by itself
        module.head.weight = module.embed.tokens.weight
    return module


def loss_parallel() -> AbstractContextManager[Any]:
    """Inside, F.cross_entropy takes logits that are cut over the vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()
