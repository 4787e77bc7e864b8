"""torch's strategies, timed against labkit's. Outside comm and runtime, only this file uses
torch.distributed for more than its checkpoint format. Imports from torch.distributed are inside
functions, because these imports are slow and print deprecation warnings.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

DDP = nn.parallel.DistributedDataParallel


def zero_1(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """torch's ZeRO-1, intended for a module wrapped in torch's DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)


def fsdp2(module: nn.Module) -> nn.Module:
    """Shard each block separately, then the remaining parameters, as users of FSDP2 do."""
    from torch.distributed.fsdp import fully_shard

    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(module)
    return module


def dtensor(module: Any, gather_logits: bool) -> nn.Module:
    """A labkit.GPT split over all ranks by torch's tensor parallelism; tied weights stay tied."""
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
    if tied:  # each use of the weight was split separately
        module.head.weight = module.embed.tokens.weight
    return module


def loss_parallel() -> AbstractContextManager[Any]:
    """A context in which F.cross_entropy accepts logits split over the vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


PIPELINES = {  # labkit's name -> torch's name of the same schedule
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",  # with one chunk
}


def pipeline(
    name: str,
    stages: Sequence[nn.Module],
    microbatches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor | None]:
    """A step under torch's schedule for `name`: `step(x, y)` sets `.grad` in this rank's part of
    `stages` (the whole model, in order) and returns the mean loss on the last stage."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    rank, size = dist.get_rank(), dist.get_world_size()
    kind: Any = get_schedule_class(PIPELINES[name])
    own = [
        PipelineStage(stages[k], k, len(stages), torch.device("cpu"))
        for k in range(rank, len(stages), size)
    ]
    schedule = kind(
        own if issubclass(kind, PipelineScheduleMulti) else own[0], microbatches, loss_fn
    )

    def step(x: Tensor, y: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (x,) if rank == 0 else ()
        if rank != size - 1:
            schedule.step(*inputs, return_outputs=False)
            return None
        schedule.step(*inputs, target=y, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().mean()

    return step
