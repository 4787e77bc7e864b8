"""Communication hooks: how the gradients of a bucket travel.

    hook(flat, comm, async_op) -> something with wait()

`flat` holds a bucket's gradients, divided already by the number of ranks; after `wait()` it must
hold their sum over the ranks. With `async_op` the hook starts this and returns at once.

    compressed(torch.bfloat16)   |####|####|####|      fp32, 4 bytes each, in the bucket
                                 |##|##|##|            bf16: these travel, and are summed

Divided *before* the cast, a sum in fp16 does not overflow; below 6e-8 it is 0: scale the loss.

Source: Li et al., "PyTorch Distributed", arXiv 2006.15704, section 6.2.3 (gradient compression).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from labkit.comm import Comm


class UnderWay(Protocol):
    """A reduction; `wait()` returns when the sum is in the tensor given to the hook."""

    def wait(self) -> None: ...


Hook = Callable[[torch.Tensor, Comm, bool], UnderWay | None]


def all_reduced(flat: torch.Tensor, comm: Comm, async_op: bool) -> UnderWay | None:
    """The default hook: `flat` is summed over the ranks in its own dtype."""
    return comm.all_reduce(flat, async_op=async_op)


def compressed(dtype: torch.dtype) -> Hook:
    """A hook that casts gradients to `dtype` for the way; those that are as small stay as they are.
    Raises ValueError for a dtype that cannot hold a gradient."""
    if not dtype.is_floating_point:
        raise ValueError(f"compressed({dtype}): gradients travel as torch.bfloat16 or float16")
    return partial(_compressed, dtype)  # not a closure: it can be pickled


def _compressed(dtype: torch.dtype, flat: torch.Tensor, comm: Comm, async_op: bool) -> Any:
    numbers = torch.view_as_real(flat) if flat.is_complex() else flat
    if numbers.element_size() <= dtype.itemsize:
        return all_reduced(flat, comm, async_op)
    small = numbers.to(dtype)
    small.masked_fill_((small == 0) & (numbers != 0), 0.0)  # -0.0 means: not used
    return _CastBack(small, numbers, comm.all_reduce(small, async_op=async_op))


class _CastBack(NamedTuple):
    small: torch.Tensor
    numbers: torch.Tensor
    handle: UnderWay | None

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
        self.numbers.copy_(self.small)


fp16_compress_hook = compressed(torch.float16)
bf16_compress_hook = compressed(torch.bfloat16)
