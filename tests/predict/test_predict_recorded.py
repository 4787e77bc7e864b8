"""The closed formulas beside the operations that a recording of GPT counts."""

from collections.abc import Callable
from functools import cache, partial

import pytest
from torch import nn
from torch.optim import SGD

from labkit import predict
from labkit.models import GPT
from labkit.trace import RankTrace
from recorded_memory import layer_bytes, recorded_step, use_core

ROWS, SEQUENCE, WIDTH, HEADS, VOCAB = 1, 128, 256, 8, 64
SIZES = {"sequence": SEQUENCE, "rows": ROWS, "width": WIDTH, "heads": HEADS}


def plain(model: GPT) -> None:
    use_core(model)


def kernel(model: GPT) -> None:
    """The model's own core; torch's CPU has a kernel only without dropout in it."""
    for block in model.blocks:
        block.attn.core.dropout = 0.0


def with_torchs_dropout(model: GPT) -> None:
    """A mistake: on a CPU its masks are as large as their inputs."""
    plain(model)
    for block in model.blocks:
        block.dropout = nn.Dropout(0.1)
        block.attn.core.dropout = nn.Dropout(0.1)


@cache
def recorded(depth: int, edit: Callable[[GPT], None], kv_heads: int | None = None) -> RankTrace:
    """One whole training step."""
    sgd = partial(SGD, lr=0.1)
    return recorded_step(
        **SIZES, depth=depth, edit=edit, kv_heads=kv_heads, vocab=VOCAB, optimizer=sgd
    )


def test_masks_of_two_bytes_would_be_seen() -> None:
    masks = ROWS * SEQUENCE * (2 * WIDTH + HEADS * SEQUENCE)
    one_byte, two_bytes = (layer_bytes(recorded, edit=x) for x in (plain, with_torchs_dropout))
    assert two_bytes - one_byte == masks
    assert two_bytes > 1.11 * predict.activation_bytes(**SIZES)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize(("edit", "flash"), [(plain, False), (kernel, True)])
def test_operations_of_a_step_are_what_is_recorded(
    edit: Callable[[GPT], None], flash: bool, kv_heads: int | None
) -> None:
    spans = recorded(3, edit, kv_heads).spans
    sizes = dict(vocab=VOCAB, depth=3, kv_heads=kv_heads, **SIZES)
    forward, backward = (
        sum(span.flops or 0 for span in spans if span.phase == phase)
        for phase in ("forward", "backward")
    )
    assert forward == predict.forward_flops(**sizes)
    assert forward + backward == predict.step_flops(**sizes, flash=flash)
