"""The optimizer's step on the parameters of a layer, recorded without data.

    2 bytes, a parameter    2, its gradient    12, its fp32 master and two moments of AdamW

Through labkit's own `MasterWeights`, as layers are (`layers.py`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from labkit.precision import MasterWeights
from labkit.replaying.dry_runs import dry_run
from labkit.replaying.planning.layers import DTYPE, Bytes, above
from labkit.trace import Operation


class Update(NamedTuple):
    """The optimizer's step on some parameters; `peak` as in a LayerPass."""

    operations: tuple[Operation, ...]
    peak: Bytes


@lru_cache(maxsize=4096)
def recorded_update(parameters: tuple[int, ...]) -> Update:
    """`MasterWeights` of AdamW on parameters of so many elements each: its second step."""
    one = dry_run(_updates, parameters, ranks=1).ranks[0]
    step = next(x for x in one.spans if x.phase == "optimizer" and not x.depth)
    held = [x.held_bytes for x in one.memory]
    inside = [x for x, point in zip(held, one.memory, strict=True) if point.when_s >= step.began_s]
    before = held[len(held) - len(inside) - 1]
    return Update(tuple(one.operations), above(max(inside, key=sum, default=before), before))


def _updates(parameters: Sequence[int]) -> None:
    every = [nn.Parameter(torch.empty(numel, dtype=DTYPE)) for numel in parameters]
    for parameter in every:
        parameter.grad = torch.empty_like(parameter)
    optimizer = MasterWeights(every, torch.optim.AdamW)
    for _ in range(2):
        optimizer.step()
