"""The closed formulas beside what recording really counts of labkit.GPT: every operation, and the
bytes of activations, all but those that the formula says it leaves out."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from labkit import predict, record
from labkit.models import GPT, PlainAttention
from labkit.trace import CATEGORIES, RankTrace

ROWS, SEQUENCE, WIDTH, HEADS, VOCAB = 1, 128, 256, 8, 64
SIZES = {"sequence": SEQUENCE, "rows": ROWS, "width": WIDTH, "heads": HEADS}


def plain(model: GPT) -> None:
    """Attention written out, with dropout in it."""
    for block in model.blocks:
        block.attn.core = PlainAttention(0.1)  # type: ignore[union-attr]


def kernel(model: GPT) -> None:
    """The model's own core; torch's CPU has a kernel only without dropout in it."""
    for block in model.blocks:
        block.attn.core.dropout = 0.0  # type: ignore[union-attr]


def with_torchs_dropout(model: GPT) -> None:
    """A mistake: on a CPU its masks are as large as their inputs."""
    plain(model)
    for block in model.blocks:
        block.dropout = nn.Dropout(0.1)
        block.attn.core.dropout = nn.Dropout(0.1)  # type: ignore[union-attr]


@cache
def recorded(depth: int, edit: Callable[[GPT], None], kv_heads: int | None) -> RankTrace:
    """One training step in bfloat16, counted."""
    torch.manual_seed(0)
    model = GPT(VOCAB, WIDTH, depth, HEADS, SEQUENCE, kv_heads=kv_heads, dropout=0.1).bfloat16()
    edit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(VOCAB, (ROWS, SEQUENCE))
    with record(detail_step=0) as trace:
        model(tokens).logsumexp(-1).sum().backward()
        optimizer.step()
    return trace.ranks[0]


def activation_bytes_at_end_of_forward(one: RankTrace) -> int:
    (end_s,) = (x.ended_s for x in one.spans if x.kind == "GPT" and x.phase == "forward")
    last = [point for point in one.memory if point.when_s <= end_s][-1]
    return last.held_bytes[CATEGORIES.index("activations")]


def of_one_layer(edit: Callable[[GPT], None]) -> float:
    deep, shallow = (
        activation_bytes_at_end_of_forward(recorded(depth, edit, None)) for depth in (3, 1)
    )
    return (deep - shallow) / 2


@pytest.mark.parametrize(
    ("edit", "formula"),
    [(plain, predict.activation_bytes), (kernel, predict.flash_activation_bytes)],
)
def test_activations_of_a_layer_are_what_is_recorded(
    edit: Callable[[GPT], None], formula: Callable[..., float]
) -> None:
    found, expected = of_one_layer(edit), formula(**SIZES)
    assert found == pytest.approx(expected, rel=0.02)
    statistics = (
        2 * 2 * ROWS * SEQUENCE
    )  # mean and deviation, two norms: what the formula leaves out
    assert found - expected in (2 * statistics, 4 * statistics), "2 bytes each, or 4"


def test_masks_of_two_bytes_would_be_seen() -> None:
    masks = ROWS * SEQUENCE * (2 * WIDTH + HEADS * SEQUENCE)
    assert of_one_layer(with_torchs_dropout) - of_one_layer(plain) == masks
    assert of_one_layer(with_torchs_dropout) > 1.11 * predict.activation_bytes(**SIZES)  # type: ignore[arg-type]


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
