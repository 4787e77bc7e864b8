"""Attention tile by tile is torch's, in values and gradients; what it holds is linear in s."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness import Edit, Mutation, here, noticed
from labkit import record
from labkit.memory import flash_attention
from labkit.memory.flash_attention import FlashAttention, flash
from labkit.models import GPT, PlainAttention
from labkit.precision.autocasting import autocast
from labkit.trace import CATEGORIES
from recorded_memory import ACTIVATIONS, use_core
from small_models import Custom
from tables import cases, raises, refusals

OTHER = CATEGORIES.index("other")


def some(
    heads: int, groups: int, s: int, t: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, heads, s, 8), (2, groups, t, 8), (2, groups, t, 8)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def off(given: list[Tensor], causal: bool, tile: int) -> float:
    """How far values and gradients are from torch's in float64, over the largest of each (or 1)."""
    found = flash(*given, causal, tile)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = F.scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True)
    dout = torch.randn_like(found)
    here = [found, *torch.autograd.grad(found, given, dout)]
    there = [expected, *torch.autograd.grad(expected, exact, dout.double())]
    assert all(x.dtype == given[0].dtype for x in here)
    pairs = zip(here, there, strict=True)
    apart = [(x - y).abs().max() / y.abs().max().clamp(min=1) for x, y in pairs]
    return torch.stack(apart).max().item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@cases(
    (64, 64, 16), (37, 37, 16), (37, 37, 64), (1, 1, 16), (1, 37, 16), (64, 37, 16), (37, 64, 7)
)  # fmt: skip
def test_values_and_gradients_are_torchs(
    s: int, t: int, tile: int, heads: int, groups: int, causal: bool
) -> None:
    assert off(some(heads, groups, s, t), causal, tile) < 1e-13


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_two_byte_types_are_off_by_rounding_only(dtype: torch.dtype, limit: float) -> None:
    assert off(some(4, 2, 100, 100, dtype), True, 32) < limit


@pytest.mark.parametrize("region", [partial(torch.autocast, "cpu"), autocast])
def test_autocast_rounds_nothing_on_the_way(region: Callable[..., Any]) -> None:
    given = some(4, 2, 100, 100, torch.bfloat16)
    without = flash(*given)
    dout = torch.randn_like(without)
    with region(dtype=torch.bfloat16):
        inside = flash(*given)
        gradients = torch.autograd.grad(inside, given, dout)
    assert torch.equal(inside, without)
    assert all(map(torch.equal, gradients, torch.autograd.grad(without, given, dout)))


def test_shapes_alone_can_be_computed() -> None:
    given = [x.detach().to("meta").requires_grad_() for x in some(4, 2, 9, 9)]
    out = flash(*given, tile=4)
    assert out.shape == given[0].shape and torch.autograd.grad(out.sum(), given)


def test_large_scores_do_not_overflow_and_without_keys_the_result_is_zero() -> None:
    q, k, v = some(2, 2, 40, 40)
    given = [(200 * q).detach().requires_grad_(), k, v]
    assert off(given, False, 16) < 1e-12
    assert flash(*given).isfinite().all()
    given = some(4, 2, 5, 0)
    out = flash(*given)
    (dq,) = torch.autograd.grad(out.sum(), given[:1])
    expected = F.scaled_dot_product_attention(*given, enable_gqa=True)
    assert torch.equal(out, expected) and not dq.any()


def test_the_model_trains_as_with_its_own_core() -> None:
    torch.manual_seed(0)
    model = GPT.preset("tiny", kv_heads=2).double()
    edited = use_core(copy.deepcopy(model), lambda: FlashAttention(tile=5))
    tokens = torch.randint(256, (2, 16))
    for one in (model, edited):
        one(tokens).square().mean().backward()
    for mine, its in zip(edited.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_on_a_gpu_as_on_a_cpu(dtype: torch.dtype) -> None:
    given = [x.detach().cuda().requires_grad_() for x in some(4, 2, 100, 100, dtype)]
    assert off(given, True, 32) < (1e-12 if dtype == torch.float64 else 2**-7)


def held_bytes(core: Callable[..., Tensor], s: int) -> tuple[int, int, int]:
    """What is kept from forward to backward, and the peaks of forward and of both, in bytes."""
    module = Custom(lambda self, *given: core(*given))
    given = [torch.randn(1, 2, s, 8, requires_grad=True) for _ in range(3)]
    with record(detail_step=0) as trace:
        module(*given).sum().backward()
    (one,) = trace.ranks.values()
    points = [(x.when_s, x.held_bytes[ACTIVATIONS] + x.held_bytes[OTHER]) for x in one.memory]
    (ended_s,) = (x.ended_s for x in one.spans if x.kind == "Custom" and x.phase == "forward")
    before = [held for when_s, held in points if when_s <= ended_s]
    every = [held for _, held in points]
    return before[-1] - every[0], max(before) - every[0], max(every) - every[0]


LENGTHS = (256, 512, 1024, 2048)


@pytest.mark.slow
def test_memory_is_linear_in_the_length() -> None:
    found = [held_bytes(lambda *x: flash(*x, True, 256), s) for s in LENGTHS]
    for s, (kept, _, _) in zip(LENGTHS, found, strict=True):
        assert kept == 4 * 2 * s * 8 + 4 * 2 * s, "out, and 4 bytes a row"
    for what in (1, 2):  # the peaks; where there is but one tile, no two are there at a time
        _, short, middle, long = (one[what] for one in found)
        assert long - middle == 2 * (middle - short), "each row takes as many bytes as the others"
        assert middle - short < 512 * (8 * 4 * 2 * 8), "a few times a row of q"


@pytest.mark.slow
def test_that_of_plain_attention_is_not() -> None:
    peaks = [held_bytes(PlainAttention(), s)[2] for s in LENGTHS[:3]]
    assert peaks[2] - peaks[1] > 3.5 * (peaks[1] - peaks[0])


test_shapes_that_do_not_fit_are_refused = refusals(
    lambda shapes: flash(*(torch.zeros(shape) for shape in shapes)),
    (((2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)), "4 heads are not divisible by 3"),
    (((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 6, 8)), "do not fit together"),
    (((2, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8)), "do not fit together"),
    (((2, 4, 5, 8), (2, 4, 5, 6), (2, 4, 5, 6)), "do not fit together"),
    (((4, 5, 8), (4, 5, 8), (4, 5, 8)), "do not fit together"),
)


def test_invalid_types_and_tiles_are_refused() -> None:
    q, k, v = (x.detach() for x in some(2, 2, 4, 4))
    raises("one floating-point dtype", flash, q, k.float(), v)
    raises("one floating-point dtype", flash, q.int(), k.int(), v.int())
    raises("tile=0", flash, q, k, v, tile=0)


FAULTS = {
    "without rescaling": ("rescale = torch.exp(highest - higher)", "rescale = 1.0"),
    "without row sums": ("dweights - _folded(delta, rows, groups)", "dweights"),
    "looks ahead": ("keys > queries", "keys > 1 + queries"),
    "skips the diagonal": ("columns.stop <= rows.start + 1", "columns.start <= rows.start"),
    "unscaled": ("q.shape[1]) * scale", "q.shape[1])"),
}


def is_right() -> None:
    assert off(some(4, 2, 37, 37), True, 16) < 1e-3


test_a_fault_is_seen = noticed(
    [
        Mutation(Edit(label, flash_attention.__name__, *change), is_right)
        for label, change in FAULTS.items()
    ],
    here,
)
