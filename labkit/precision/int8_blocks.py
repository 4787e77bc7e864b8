"""Int8 blocks: one byte per element, and one scale per block of elements.

    x           0.02  -0.50   0.13   0.31  |  7.00  -1.20   3.30   0.04      fp32, 4 bytes each
    absmax      0.50                       |  7.00                           fp32, one per block
    q              5   -127     33     79  |   127    -22     60      1      int8
    decoded     0.020 -0.500  0.130  0.311 |  7.00  -1.21   3.31   0.055     q · absmax / 127

    step in a block = absmax / 127        error <= half a step = absmax / 254
    bytes = numel + 4 · ceil(numel / block)

An outlier makes only its block coarser; smaller blocks limit the damage, but cost 4 bytes each.

Source: Dettmers et al., arXiv 2110.02861, section 2; "LLM.int8()", arXiv 2208.07339, section 2.1
(absmax); Wang et al., "ZeRO++", arXiv 2306.10209, section 3.1 (quantized weight communication).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

LEVELS = 127  # -127 to 127: -128 is unused, for symmetry


class Quantized(NamedTuple):
    """`q`: int8, in the shape of the encoded tensor. `absmax`: fp32 [blocks]."""

    q: torch.Tensor
    absmax: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.absmax.nbytes


@dataclass(frozen=True)
class Int8Blocks:
    """Blocks of `block` elements in a tensor's flat order; the last block may be shorter."""

    block: int = 256

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"Int8Blocks(block={self.block}): a block needs at least 1 element")

    def nbytes(self, numel: int) -> int:
        return numel + 4 * -(-numel // self.block)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """The quantization step at each element of `x`: [*x.shape], fp32."""
        return self._per_element(self._absmax(x), x.shape) / LEVELS

    def encode(self, x: torch.Tensor) -> Quantized:
        """Round to the nearest level, ties to even. A block with NaN or infinity decodes to NaN."""
        if not x.is_floating_point():
            raise ValueError(
                f"Int8Blocks.encode({x.dtype}): expected floating-point elements; use x.float()"
            )
        absmax = self._absmax(x)
        scale = self._per_element(absmax, x.shape)
        levels = torch.where(scale > 0, x.float() / scale, 0.0) * LEVELS  # NaN > 0 is false
        return Quantized(levels.round().to(torch.int8), absmax)

    def decode(self, quantized: Quantized) -> torch.Tensor:
        """Return an fp32 tensor in the shape of `q`."""
        q, absmax = quantized
        return q.float() / LEVELS * self._per_element(absmax, q.shape)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Encode and decode `x`, keeping its dtype."""
        return self.decode(self.encode(x)).to(x.dtype)

    def _absmax(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.detach().float().reshape(-1)
        blocks = pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        absmax = blocks.abs().amax(dim=1) if len(flat) else flat
        return torch.where(absmax.isfinite(), absmax, torch.nan)

    def _per_element(self, of_blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return of_blocks.repeat_interleave(self.block)[: shape.numel()].view(shape)
