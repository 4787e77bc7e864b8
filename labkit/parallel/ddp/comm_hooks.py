"""Communication hooks, which reduce the gradients of a bucket.

    hook(flat, comm, async_op) -> an object with wait(), or None if already complete

`flat` contains a bucket's gradients, already divided by the number of ranks. After `wait()`, `flat`
must contain the sum over ranks. With `async_op`, the hook returns before the reduction is complete.

    compressed(torch.bfloat16)   |####|####|####|      fp32 in the bucket, 4 bytes per element
                                 |##|##|##|            bf16 while reduced, 2 bytes per element

Gradients are divided *before* the cast, so that fp16 sums do not overflow. Magnitudes up to 3e-8
become 0 in fp16: use a loss scaler.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 6.2.3 (gradient compression).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from labkit.comm import Comm


class PendingReduction(Protocol):
    """A running reduction; after `wait()`, `flat` contains the sum."""

    def wait(self) -> None: ...


Hook = Callable[[torch.Tensor, Comm, bool], PendingReduction | None]


def all_reduced(flat: torch.Tensor, comm: Comm, async_op: bool) -> PendingReduction | None:
    """The default hook: an all-reduce in the dtype of `flat`."""
    return comm.all_reduce(flat, async_op=async_op)


def compressed(dtype: torch.dtype) -> Hook:
    """Returns a hook that all-reduces gradients in `dtype` if it is narrower than their dtype.
    Raises ValueError if `dtype` is not a floating-point dtype."""
    if not dtype.is_floating_point:
        raise ValueError(f"compressed({dtype}): choose torch.bfloat16 or torch.float16")
    return partial(_compressed, dtype)  # picklable, unlike a closure


def _compressed(dtype: torch.dtype, flat: torch.Tensor, comm: Comm, async_op: bool) -> Any:
    elements = torch.view_as_real(flat) if flat.is_complex() else flat
    if elements.element_size() <= dtype.itemsize:
        return all_reduced(flat, comm, async_op)
    small = elements.to(dtype)
    small.masked_fill_((small == 0) & (elements != 0), 0.0)  # -0.0 would mean unused
    return _CastBack(small, elements, comm.all_reduce(small, async_op=async_op))


class _CastBack(NamedTuple):
    small: torch.Tensor
    elements: torch.Tensor
    handle: PendingReduction | None

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        self.elements.copy_(self.small)


fp16_compress_hook = compressed(torch.float16)
bf16_compress_hook = compressed(torch.bfloat16)
