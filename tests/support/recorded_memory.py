"""What a GPT keeps from forward to backward, as a recording counts it; what is freed at once."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from labkit import record
from labkit.models import GPT, PlainAttention
from labkit.trace import CATEGORIES, RankTrace

ACTIVATIONS = CATEGORIES.index("activations")


def use_core(model: GPT, core: Callable[[], Any] = lambda: PlainAttention(0.1)) -> GPT:
    for block in model.blocks:
        block.attn.core = core()
    return model


def recorded_step(
    sequence: int,
    rows: int,
    width: int,
    heads: int,
    depth: int,
    edit: Callable[[GPT], object],
    vocab: int = 64,
    kv_heads: int | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> RankTrace:
    """Forward and backward in bfloat16, with dropout, after `edit(model)`; and the step of
    `optimizer(parameters)`, where it is given."""
    torch.manual_seed(0)
    model = GPT(vocab, width, depth, heads, sequence, kv_heads=kv_heads, dropout=0.1).bfloat16()
    edit(model)
    stepper = optimizer and optimizer(model.parameters())
    with record(detail_step=0) as trace:
        model(torch.randint(vocab, (rows, sequence))).logsumexp(-1).sum().backward()
        if stepper is not None:
            stepper.step()
    return trace.ranks[0]


def kept_bytes(one: RankTrace) -> int:
    """Activations when forward has ended."""
    (ended_s,) = (x.ended_s for x in one.spans if x.kind == "GPT" and x.phase == "forward")
    return [x for x in one.memory if x.when_s <= ended_s][-1].held_bytes[ACTIVATIONS]


@contextmanager
def without_collector() -> Iterator[None]:
    """What is freed in this block is freed without the collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def layer_bytes(step: Callable[..., RankTrace], *sizes: Any, **options: Any) -> float:
    """What two layers more keep, halved."""
    deep, shallow = (kept_bytes(step(*sizes, depth=depth, **options)) for depth in (3, 1))
    return (deep - shallow) / 2
