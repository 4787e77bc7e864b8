"""Master weights: update a 16-bit model as precisely as an fp32 model.

    each parameter    2 bytes in bf16 or fp16, which forward and backward use
                      2 bytes of gradient
                      4 bytes, its fp32 master copy       } K = 12 bytes that
                      8 bytes, Adam's two moments in fp32 } only the optimizer uses

bf16 has 8 bits of precision: an update below 1/512 of the weight is lost in the addition, and so
are some updates below 1/256. So the optimizer updates an fp32 copy, then rounds this copy:

    gradient (bf16) -> fp32 -> step on the master -> rounded -> parameter (bf16)

Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.1; K = 12:
Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 3.1.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from labkit.holdings import OwnedPiece
from labkit.precision.shadow_optimizer import (
    LOW,
    ShadowOptimizer,
    fp32_gradient,
    fp32_of,
    options_of,
    sync_master_from_param,
    value_of,
)

CHUNK_BYTES = 25 * 2**20  # of masters with fp32 gradients at the same time


class MasterWeights(ShadowOptimizer):
    """Runs `optimizer_cls(**defaults)` on fp32 copies of bf16 and fp16 `params`, and directly on
    wider params; `params`: parameters, parameter groups or named parameters. A write to a parameter
    under `torch.no_grad()` also updates its master; a write to `p.data` does not.

    >>> optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    """

    def __init__(self, params: Any, optimizer_cls: Callable[..., Any], **defaults: Any):
        super().__init__(params, dict(defaults))
        trainable = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        self._master = {p: nn.Parameter(fp32_of(p)) for p in trainable}
        self._low = [p for p in trainable if p.dtype in LOW]
        self._step_on({p: [x] for p, x in self._master.items()}, optimizer_cls, defaults)
        self._versions = {p: p._version for p in self._low}

    def __getstate__(self) -> dict[str, Any]:  # torch's method returns only groups and state
        own = ("inner", "_master", "_low", "_versions")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = value_of(closure)
        self._check_frozen(self._master)
        self._hand_down_options()
        for p in self._low:
            if p._version != self._versions[p]:
                sync_master_from_param(self._master[p], p)
        for chunk in self._chunks():
            for p in chunk:
                assert p.grad is not None
                self._master[p].grad = fp32_gradient(p.grad, self.gradient_factor)
            self.inner.step()  # only this chunk's masters have gradients
            self._check_options_unchanged()
            for p in chunk:
                self._master[p].grad = None
        self.gradient_factor = None
        self.after_load()
        return value

    def _chunks(self) -> Iterator[list[torch.Tensor]]:
        chunk: list[torch.Tensor] = []
        chunk_bytes = 0
        for p in (p for p in self._master if p.grad is not None):
            chunk.append(p)
            chunk_bytes += self._master[p].nbytes
            if chunk_bytes >= CHUNK_BYTES:
                yield chunk
                chunk, chunk_bytes = [], 0
        if chunk:
            yield chunk

    def _check_options_unchanged(self) -> None:
        """Raise ValueError if `inner` changed its options: all chunks need the same options."""
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            for key, x in options_of(inner_group).items():
                if key not in group or (x is not group[key] and x != group[key]):
                    raise ValueError(
                        f"{type(self.inner).__name__} cannot step on master weights: its step "
                        f"changes the option {key!r} of the group; keep counters in the state of "
                        "each parameter"
                    )

    def owned(self, model: nn.Module) -> list[OwnedPiece]:
        """All parameters of `model`, unsharded, each replaced by its master, if any."""
        return [
            OwnedPiece(name, p.shape, 0, self._master[p], self.inner)
            if p in self._master
            else OwnedPiece(name, p.shape, 0, p, None)
            for name, p in model.named_parameters()
        ]

    def _masters(self) -> list[torch.Tensor]:
        return [self._master[p] for p in self._low]

    @torch.no_grad()
    def after_load(self) -> None:
        for p in self._low:
            p.copy_(self._master[p])
            self._versions[p] = p._version
