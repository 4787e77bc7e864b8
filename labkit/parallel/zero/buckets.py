"""A bucket's gradients under ZeRO-1 and ZeRO-2, and this rank's share of the averages.

    gradients    a a a a a a b b c c c .    filled during backward, divided by n
    averaged             a a b b            rank 1's share (of 3), summed over ranks

Between backward and step, `.grad` is a placeholder that only marks that a gradient exists.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.comm import Comm, Handle
from labkit.parallel.common.flat import GradBuffer, flagged_unused
from labkit.parallel.zero.shares import ParamShare
from labkit.precision.shadow_optimizer import fp32_gradient


class GradPlaceholder(Tensor):
    """A placeholder with the gradient's shape and dtype. Any computation raises ValueError, since
    torch's `clip_grad_norm_` would clip each share by the norm of that share."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __repr__ = object.__repr__  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise ValueError(
            f"{func.overloadpacket.__name__} on the `.grad` of a ZeroOptimizer's parameter: each "
            "rank has only a share of the averaged gradient; clip with labkit.clip_grad_norm, "
            "scale with labkit.GradScaler (not torch.amp's), change the tensors of "
            "optimizer.gradient_pieces()[0], or set `.grad` to a new tensor, which `step` averages"
        )


def grad_placeholder(p: Tensor, gradient: Tensor | None) -> Tensor:
    """Returns `p.grad` for the time from backward to step, in the memory of `gradient`, if any."""
    like = p.detach().new_empty(()).expand(p.shape) if gradient is None else gradient
    if type(like) is not Tensor:  # a fake tensor, in a dry run
        return like
    if gradient is None:
        like.untyped_storage().resize_(0)
    return Tensor._make_subclass(GradPlaceholder, like)


class ZeroBucket(ParamShare, GradBuffer):
    """Parameters, gradients and this rank's share of both; stage 1 keeps unsharded gradients."""

    def __init__(self, parameters: Sequence[Tensor], comm: Comm, names: Mapping[Tensor, str]):
        ParamShare.__init__(self, parameters, comm)
        GradBuffer.__init__(self, parameters, self.partition, names)
        self.placeholders: dict[Tensor, Tensor] = {}  # `.grad` after backward
        self.averaged = self.share[:0]  # empty until gradients arrive
        self.sending: Handle | None = None
        self._accumulating: set[Tensor] = set()  # parameters with a gradient from earlier backwards
        self._set_aside: Tensor | None = None  # averaged gradients so far

    def accumulate_hook(self, p: Tensor) -> Callable[[Any], Any]:
        """Returns a hook that divides new gradients by n if `p.grad` already is."""

        def hook(gradients: Any) -> Any:
            if not self.restore_grad(p):
                return None
            self._accumulating.add(p)
            return (gradients[0] / self.comm.size,)

        return hook

    def restore_grad(self, p: Tensor) -> bool:
        """Restores `p.grad` for accumulation; returns whether `p.grad` is divided by n."""
        if p.grad is not None and p.grad is self.placeholders.get(p):
            p.grad = self.view[p]
        return p.grad is not None and p.grad is self.view.get(p)

    def take(self, p: Tensor) -> None:
        super().take(p)
        self._put_in_place(p, divided=p in self._accumulating)
        self._accumulating.discard(p)

    def _put_in_place(self, p: Tensor, divided: bool) -> None:
        if self.flat is None:
            flat = torch.empty_like(self.whole)
            flat[self.partition.numel :].zero_()
            self.use(flat)
        if not self.restore_grad(p) and p.grad is not None:
            self.put(p, 1 if divided else self.comm.size)

    def has_manual_gradient(self) -> bool:
        return any(p.grad is not self.placeholders.get(p) for p in self.parameters)

    def fill(self) -> Tensor:
        for p in self.parameters:
            self._put_in_place(p, divided=False)
        return self.flag_unused()

    def receive_buffer(self, gradients: Tensor) -> Tensor:
        self.averaged = self.partition.share_of(gradients, self.comm.rank)
        return self.averaged

    def receive(self) -> None:
        if self.sending is not None:
            self.sending.wait()
            self.sending = None
        self._on_averages_received()
        self._set_placeholders([p for p in self.parameters if self.has_gradient(p)])

    def reset(self) -> None:
        super().reset()
        self._accumulating.clear()

    def _on_averages_received(self) -> None:
        """Zeroes other ranks' shares, so that a second backward adds only new gradients."""
        assert self.flat is not None
        begin = self.comm.rank * self.partition.share
        self.flat[:begin].zero_()
        self.flat[begin + self.partition.share :].zero_()
        for p in self._used_elsewhere(self.averaged):
            p.grad = self.view[p]

    def _used_elsewhere(self, arrived: Tensor) -> list[Tensor]:
        return [
            p
            for p, piece in zip(self.piece_params, self.pieces, strict=True)
            if p in self.unused and not flagged_unused(arrived[piece.at : piece.at + 1])
        ]

    def _set_placeholders(self, averaged: Sequence[Tensor]) -> None:
        self.placeholders = {p: grad_placeholder(p, self.view.get(p)) for p in averaged}
        for p, placeholder in self.placeholders.items():
            p.grad = placeholder

    def has_gradient(self, p: Tensor) -> bool:
        return p.grad is not None

    def own_gradients(self, averaged: Tensor | None = None) -> list[Tensor | None]:
        """The averaged gradient, or None, for each slice of this rank's share."""
        averaged = self.averaged if averaged is None else averaged
        return [
            averaged[piece.at : piece.at + piece.numel] if self.has_gradient(p) else None
            for p, piece in zip(self.piece_params, self.pieces, strict=True)
        ]

    def discard_gradients(self) -> None:
        self.placeholders = {}  # each `.grad` is already None

    def zero_gradients(self) -> None:
        by_hand = [p.grad for p in self.parameters if p.grad is not self.placeholders.get(p)]
        for x in (self.averaged, self.flat, *by_hand):
            if x is not None:
                x.zero_()

    def set_aside(self) -> None:  # implements TiedGradient, with `sum_copies`
        has_gradients = any(self.has_gradient(p) for p in self.piece_params)
        self._set_aside = self.averaged.clone() if has_gradients else None
        for p in self.parameters:
            p.grad = None

    def sum_copies(self, copies: Any) -> None:
        copies.all_reduce(self.averaged)  # the only parameter in the bucket, so shares match
        if self._set_aside is not None:
            self.averaged.add_(self._set_aside)
        self._set_placeholders(self.parameters)

    def step(self, optimizer: torch.optim.Optimizer, factor: float | Tensor | None) -> None:
        """Steps on this rank's share; multiplies 16-bit gradients by `factor`."""
        gradients = self.own_gradients()
        if any(g is not None for g in gradients):  # without gradients, skip the fp32 copy
            gradients = self.own_gradients(fp32_gradient(self.averaged, factor))
        for x, gradient in zip(self.stand_ins, gradients, strict=True):
            x.grad = gradient
        optimizer.step()
        for x in self.stand_ins:
            x.grad = None

    def end_step(self) -> None:
        """Called after a step or a skipped step: the gradients are no longer needed."""


class Stage2Bucket(ZeroBucket):
    """Stage 2: keeps this rank's share of the gradients and frees the rest. The first averages
    after `zero_grad` or a step overwrite `averaged`; later averages are added (accumulation)."""

    _consumed = False  # the next backward may overwrite `averaged`
    _incoming: Tensor | None = None

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.averaged = torch.zeros_like(self.share)
        self.averaged_for: set[Tensor] = set()

    def receive_buffer(self, gradients: Tensor) -> Tensor:
        if self._consumed:
            self.discard_gradients()
        self._incoming = torch.empty_like(self.averaged) if self.averaged_for else None
        self.averaged_for.update(p for p in self.parameters if p.grad is not None)
        for p in self.parameters:
            p.grad = None
        return self.averaged if self._incoming is None else self._incoming

    def _on_averages_received(self) -> None:
        arrived = self.averaged if self._incoming is None else self._incoming
        self.averaged_for.update(self._used_elsewhere(arrived))
        if self._incoming is not None:
            self.averaged.add_(self._incoming)
        self.free()
        self._incoming = None

    def has_gradient(self, p: Tensor) -> bool:
        return p in self.averaged_for

    def restore_grad(self, p: Tensor) -> bool:
        """Keeps the averages of `p` unless the user has set `p.grad`."""
        placeholder = self.placeholders.pop(p, None)
        if placeholder is not None and p.grad is placeholder:
            p.grad = None
        elif placeholder is not None:
            self.averaged_for.discard(p)
            for piece in self.pieces:
                if self.parameters[piece.index] is p:
                    self.averaged[piece.at : piece.at + piece.numel].zero_()
        return super().restore_grad(p)

    def end_step(self) -> None:
        self._consumed = True

    def set_aside(self) -> None:
        if self._consumed:
            self.discard_gradients()
        super().set_aside()
        self.averaged_for.clear()

    def sum_copies(self, copies: Any) -> None:
        super().sum_copies(copies)
        self.averaged_for.update(self.parameters)

    def zero_gradients(self) -> None:
        super().zero_gradients()
        self._consumed = False

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self._consumed = False
        self.averaged_for.clear()
