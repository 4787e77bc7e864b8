"""Sums the gradients of k micro-batches in fp32 while the model is in 16 bits.

    backward 1   p.grad bf16 ─┐
    backward 2   p.grad bf16 ─┼─▶  += sum, fp32  ──hand_over()──▶  p.grad fp32  ──▶  optimizer
    backward k   p.grad bf16 ─┘    and p.grad is freed

    memory          4 bytes per parameter for the sums
    communication   with `comm`: 2(n-1)/n · 4 bytes per parameter and step, in one fp32 all-reduce

bf16 has 8 bits of precision: once the sum is 512 times as large as a gradient, adding the gradient
changes nothing. Of k equal gradients, only the first 256 to 383 count; in fp32, at least 2²⁴ do.

Sources: Megatron-LM, `--accumulate-allreduce-grads-in-fp32`; growth of the error in a plain sum:
Higham, "The Accuracy of Floating Point Summation", 1993, section 2.
"""

from collections.abc import Iterable
from weakref import WeakMethod

import torch
from torch import nn

from labkit.comm import Comm
from labkit.precision.shadow_optimizer import LOW, NotCopyable


class Fp32Gradients(NotCopyable):
    """Adds each fp32 or 16-bit gradient of `params` (frozen parameters are skipped) to an fp32 sum
    as soon as backward has computed it. `comm`: the ranks over which `hand_over` averages; with
    DDP, run every micro-batch in `ddp.no_sync()` and pass `ddp.comm`.

    >>> gradients = Fp32Gradients(model.parameters())
    >>> for part in batch.split(k):
    ...     loss(model(part.x), part).backward()
    >>> gradients.hand_over()  # now .grad holds the fp32 sums
    >>> optimizer.step()  # MasterWeights, or any optimizer that takes fp32 gradients
    >>> optimizer.zero_grad()

    Raises ValueError if no parameter is trainable or one is wider than fp32; in backward, if a
    strategy synchronizes the gradients or `comm` lacks any of the strategy's ranks."""

    copy_advice = "create one for the copied model's parameters"

    def __init__(self, params: Iterable[nn.Parameter], comm: Comm | None = None):
        self.parameters = [p for p in dict.fromkeys(params) if p.requires_grad]  # no duplicates
        if not self.parameters:
            raise ValueError("Fp32Gradients: pass at least one parameter that requires gradients")
        if wide := {p.dtype for p in self.parameters} - {torch.float32, *LOW}:
            raise ValueError(
                f"sums in float32 would round gradients of {wide.pop()}; omit such parameters: "
                "their gradients accumulate in .grad"
            )
        self.comm = None if comm is None else Comm.of(comm)
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes), device=self.parameters[0].device)  # one all-reduce
        parts = self.flat.split(sizes)
        self.sums = {p: x.view(p.shape) for p, x in zip(self.parameters, parts, strict=True)}
        self._arrived: set[nn.Parameter] = set()  # with a gradient since hand_over()
        weak = WeakMethod(self._add)  # the hooks do not keep this object alive
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p: add(p) if (add := weak()) else None)
            for p in self.parameters
        ]

    @torch.no_grad()
    def _add(self, p: nn.Parameter) -> None:
        owner = getattr(p, "_labkit_owner", lambda: None)()
        if getattr(owner, "_synchronize", owner is not None):
            raise ValueError(
                f"a {type(owner).__name__} sends these gradients as soon as they are ready; with "
                "DDP, run every micro-batch in `ddp.no_sync()` and pass its comm to Fp32Gradients; "
                "ZeRO accumulates its own shards"
            )
        replicas: Comm | None = getattr(owner, "comm", None)
        averaged = {*self.comm.ranks} if self.comm else set[int]()
        if replicas is not None and replicas.size > 1 and not {*replicas.ranks} <= averaged:
            raise ValueError(
                f"in `no_sync()` gradients are not averaged over the {replicas.size} ranks of "
                f"{type(owner).__name__}, so their weights would diverge; pass its comm: "
                "Fp32Gradients(params, ddp.comm)"
            )
        if p.grad is self.sums[p]:
            raise RuntimeError(
                "backward has added to the last step's gradients; call optimizer.zero_grad() "
                "after each step, without set_to_none=False"
            )
        if not self._arrived:
            self.flat.zero_()
        self._arrived.add(p)
        self.sums[p] += p.grad  # converts bf16 to fp32 first, exactly
        p.grad = None

    def hand_over(self) -> None:
        """Store the fp32 sums (with `comm`: their means over the ranks) in `.grad`."""
        if self.comm is not None:
            if not self._arrived:
                self.flat.zero_()
            self.comm.all_reduce(self.flat, op="mean")
        for p in self.parameters if self.comm is not None else self._arrived:
            p.grad_dtype = None  # allows another dtype in .grad than in p
            p.grad = self.sums[p]
        self._arrived.clear()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
