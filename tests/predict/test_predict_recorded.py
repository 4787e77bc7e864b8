"""The closed formulas beside the operations and activation bytes that a recording of GPT counts."""

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


def of_one_layer(edit: Callable[[GPT], None]) -> float:
    return layer_bytes(recorded, edit=edit)


@pytest.mark.parametrize(
    ("edit", "formula"),
    [(plain, predict.activation_bytes), (kernel, predict.flash_activation_bytes)],
)
def test_activations_of_a_layer_are_what_is_recorded(
    edit: Callable[[GPT], None], formula: Callable[..., float]
) -> None:
    found, expected = of_one_layer(edit), formula(**SIZES)
    assert found == pytest.approx(expected, rel=0.02)
    statistics = 2 * 2 * ROWS * SEQUENCE  # mean and deviation, two norms: not in the formula
    assert found - expected in (2 * statistics, 4 * statistics), "2 bytes each, or 4"


def test_masks_of_two_bytes_would_be_seen() -> None:
    masks = ROWS * SEQUENCE * (2 * WIDTH + HEADS * SEQUENCE)
    assert of_one_layer(with_torchs_dropout) - of_one_layer(plain) == masks
    assert of_one_layer(with_torchs_dropout) > 1.11 * predict.activation_bytes(**SIZES)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize(("edit", "flash"), [(plain, False), (kernel, True)])
def test_operations_of_a_step_are_what_is_recorded(
    edit: Callable[[GPT], None], flash: bool, kv_heads: int | None
) -> None:
    one = recorded(3, edit, kv_heads)
    sizes = dict(vocab=VOCAB, depth=3, kv_heads=kv_heads, **SIZES)
    counted = {
        phase: sum(span.flops or 0 for span in one.spans if span.phase == phase)
        for phase in ("forward", "backward")
    }
    assert counted["forward"] == predict.forward_flops(**sizes)
    assert sum(counted.values()) == predict.step_flops(**sizes, flash=flash)
