"""Clipping by the norm of all gradients: as a single process, whoever holds them."""

import pytest
import torch
from torch import nn

from labkit import Comm, MasterWeights
from labkit.parallel.common.clipping import clip_grad_norm, norm_of_pieces
from worlds import on_each_rank

NORMS = (2.0, 1.0, 3.0, float("inf"))


def model_and_rows() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return module, torch.randn(9, 3, dtype=torch.float64)


def equal(found: torch.Tensor | None, expected: torch.Tensor, rtol: float = 1e-12) -> bool:
    return torch.allclose(found.double(), expected, rtol=rtol, atol=0)


def right(norm_type: float, max_norm: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    module, rows = model_and_rows()
    module(rows).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type)
    return norm, [p.grad for p in module.parameters() if p.grad is not None]


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
    """All gradients flat, cut unevenly: rank 0 has 5 numbers, rank 1 none, rank 2 the rest."""

    def __init__(self, gradients: list[torch.Tensor]):
        flat = torch.cat([x.flatten() for x in gradients])
        mine = [flat[:5], flat[:0], flat[5:]][Comm().rank]
        self.pieces = [mine[:2], mine[2:]] if mine.numel() else []

    def gradient_pieces(self) -> tuple[list[torch.Tensor], Comm]:
        return self.pieces, Comm()


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
@on_each_rank("world3")
def test_pieces_clip_as_a_single_process(max_norm: float) -> None:
    module, rows = model_and_rows()
    module(rows).square().mean().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    for norm_type in NORMS:
        owner = Pieces(gradients)
        norm = clip_grad_norm(owner, max_norm, norm_type)
        expected, clipped = right(norm_type, max_norm)
        assert equal(norm, expected, 1e-12 if owner.pieces else 1e-6)
        for piece, whole in zip(owner.pieces, Pieces(clipped).pieces):
            assert equal(piece, whole)
    with pytest.raises(ValueError, match="norm_type=0: pieces add up for p > 0"):
        clip_grad_norm(owner, 1.0, 0)


@on_each_rank("world3")
def test_norms_of_bf16_pieces_are_not_rounded() -> None:
    """1000 ones on each rank: bf16, with 8 bits, knows 31.625 and 31.75, not 31.6228."""
    owner = Pieces([torch.zeros(0)])
    owner.pieces = [torch.ones(1000 if Comm().rank else 0, dtype=torch.bfloat16)]
    norm = clip_grad_norm(owner, 1.0)
    assert norm.item() == pytest.approx(2000**0.5, rel=1e-6) and norm.dtype == torch.float32


@on_each_rank("world3")
def test_powers_of_fp16_pieces_do_not_overflow() -> None:
    """4096 numbers of 60: the norm is 3840 on each rank, its square beyond fp16's 65504."""
    owner = Pieces([torch.zeros(0)])
    half = torch.full((4096,), 60.0, dtype=torch.float16)
    owner.pieces = [half, half[:0]]
    norm = clip_grad_norm(owner, 1.0)
    clip_grad_norm(owner, 1.0, float("inf"))
    assert norm.item() == pytest.approx(3**0.5 * 3840)
    assert half[0].item() == pytest.approx(60 / (3**0.5 * 3840), rel=1e-3)


@on_each_rank("world3")
def test_a_rank_may_have_no_pieces_at_all() -> None:
    comm = Comm()
    pieces = [torch.tensor([3.0, 4.0])] if comm.rank == 1 else []
    assert norm_of_pieces([(x, x) for x in pieces], comm).item() == 5.0
