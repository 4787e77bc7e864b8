"""torch's own data-parallel strategies, to be timed beside labkit's. This file alone imports
torch.distributed outside of the door and of what starts ranks: its peers come from there (when they
are used, for that takes its time and warns of torch's own past).
"""

from collections.abc import Iterable

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
