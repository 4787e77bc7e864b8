"""Clipping by the norm of all gradients: as a single process, whoever holds them."""

import pytest
import torch
from torch import nn

from labkit import Comm, MasterWeights
from labkit.parallel.common.clipping import clip_grad_norm
from tables import raises
from worlds import on_each_rank


def equal(found: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-12) -> bool:
    return torch.allclose(found.double(), expected, rtol=rtol, atol=0)


def test_the_norm_of_16_bit_gradients_of_masters_is_not_rounded() -> None:
    """bf16 knows 5472 and 5504, and nothing between."""
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad = torch.tensor([5472.0, 250.0, 0.0], dtype=torch.bfloat16)
    exact = p.grad.float().norm()
    optimizer = MasterWeights([p], torch.optim.SGD, lr=1.0)
    norm = clip_grad_norm(optimizer, 5472.0)
    assert norm.dtype == torch.float32 and equal(norm, exact.double(), 1e-6)
    clip_grad_norm(optimizer, 1.0)
    assert p.grad.float().norm().item() == pytest.approx(1.0, rel=2**-8)


class Pieces:
    def __init__(self, *pieces: torch.Tensor):
        self.pieces = list(pieces)

    def gradient_pieces(self) -> tuple[list[torch.Tensor], Comm]:
        return self.pieces, Comm()


def cut_unevenly(module: nn.Module) -> Pieces:
    """A copy of all gradients, flat: rank 0 has 5 numbers, rank 1 none, rank 2 the rest."""
    flat = torch.cat([p.grad.flatten() for p in module.parameters()])
    here = [flat[:5], flat[:0], flat[5:]][Comm().rank]
    return Pieces(here[:2], here[2:]) if here.numel() else Pieces()


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
@on_each_rank("world3")
def test_pieces_clip_as_a_single_process(max_norm: float) -> None:
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        module(torch.randn(9, 3, dtype=torch.float64)).square().mean().backward()
        owner = cut_unevenly(module)
        norm = clip_grad_norm(owner, max_norm, norm_type)
        expected = nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type)
        assert equal(norm, expected, 1e-12 if owner.pieces else 1e-6)
        for piece, clipped in zip(owner.pieces, cut_unevenly(module).pieces, strict=True):
            assert equal(piece, clipped)
    raises("norm_type=0: choose p > 0", clip_grad_norm, owner, 1.0, 0)


@on_each_rank("world3")
def test_norms_of_bf16_pieces_are_not_rounded() -> None:
    """1000 ones on each rank: bf16, with 8 bits, knows 31.625 and 31.75, not 31.6228."""
    owner = Pieces(torch.ones(1000 if Comm().rank else 0, dtype=torch.bfloat16))
    norm = clip_grad_norm(owner, 1.0)
    assert norm.item() == pytest.approx(2000**0.5, rel=1e-6) and norm.dtype == torch.float32


@on_each_rank("world3")
def test_powers_of_fp16_pieces_do_not_overflow() -> None:
    """4096 numbers of 60: the norm is 3840 on each rank, its square beyond fp16's 65504."""
    half = torch.full((4096,), 60.0, dtype=torch.float16)
    owner = Pieces(half, half[:0])
    norm = clip_grad_norm(owner, 1.0)
    clip_grad_norm(owner, 1.0, float("inf"))
    assert norm.item() == pytest.approx(3**0.5 * 3840)
    assert half[0].item() == pytest.approx(60 / (3**0.5 * 3840), rel=1e-3)
