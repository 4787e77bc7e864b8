"""Matmuls of 8-bit tensors, with one scale per tensor.

    x [m, k] ── · s_x ── e4m3 ┐
                              ├── matmul, summed in fp32 ── / (s_x s_w) ──▶ y [m, n]
    w [n, k] ── · s_w ── e4m3 ┘

    forward    y  = x  wᵀ    e4m3 · e4m3
    backward   dx = g  w     e5m2 · e4m3      g = dL/dy, [m, n]
               dw = gᵀ x     e5m2 · e4m3

    e4m3   4 exponent and 3 mantissa bits: up to 448, rounding error up to 1/16 of the value
    e5m2   5 and 2 bits: up to 57344, error up to 1/8; gradients need range more than precision

Each tensor is scaled by s = 2^⌊log2(max/amax)⌋: amax is its largest magnitude, max the dtype's.
*Delayed* scaling uses the largest amax of recent calls, so the cast need not wait for the new amax;
larger values saturate, and recompute is unsupported. Forward saves x and w in 8 bits for backward.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, section 3; delayed
scaling: Transformer Engine, `DelayedScaling`.
"""

import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from labkit.dispatch import autocast_dtype

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITY = (8, 9)  # the lowest compute capability with 8-bit matmuls
LARGEST_POWER = 126  # of two in a scale: 2^-126 is fp32's smallest normal number
TILE = 16  # torch._scaled_mm needs sizes that are multiples of 16


class Fp8Cast(nn.Module):
    """Casts tensors to 8 bits, scaled by their amax or the largest of `history` earlier amaxes."""

    def __init__(self, dtype: torch.dtype, history: int = 0) -> None:
        super().__init__()
        self.dtype, self.largest = dtype, torch.finfo(dtype).max
        self.amaxes: Tensor
        self.register_buffer("amaxes", torch.zeros(history), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x of any shape -> x · s in 8 bits, and s, an fp32 scalar."""
        amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        scale = self.scale_of(self._expected(amax))
        scaled = (x.float() * scale).clamp(-self.largest, self.largest)
        # Keep overflow visible to a loss scaler.
        return torch.where(x.isinf(), torch.nan, scaled).to(self.dtype), scale

    def scale_of(self, amax: Tensor) -> Tensor:
        power = torch.floor(torch.log2(self.largest / amax))
        scale = torch.exp2(power.clamp(max=LARGEST_POWER))
        usable = (amax > 0) & torch.isfinite(amax)
        return torch.where(usable, scale, torch.ones_like(amax))

    def _expected(self, amax: Tensor) -> Tensor:
        if not len(self.amaxes):
            return amax
        before = self.amaxes.amax()
        if self.training:
            new = torch.where(torch.isfinite(amax), amax, before)  # else an inf stays for n calls
            self.amaxes.copy_(torch.cat([new.view(1), self.amaxes[:-1]]))
        return torch.where(before > 0, before, amax)

    def _apply(self, fn: Any, recurse: bool = True) -> "Fp8Cast":
        exact = self.amaxes
        super()._apply(fn, recurse)
        if self.amaxes.dtype != exact.dtype:  # model.half(): an amax may exceed 65504
            self.amaxes = exact.to(self.amaxes.device)
        return self


def fp8_matmul(a: Tensor, b: Tensor, scale: Tensor, dtype: torch.dtype, simulate: bool) -> Tensor:
    """8-bit a [m, k], b [k, n] -> a b / scale [m, n] in `dtype`; `simulate`: multiply in fp32."""
    if simulate:
        return (a.float() @ b.float() / scale).to(dtype)
    m, n = a.shape[0], b.shape[1]
    a = F.pad(a.view(torch.uint8), _to_tiles(a)).view(a.dtype)
    b = F.pad(b.view(torch.uint8), _to_tiles(b)).view(b.dtype)
    columns = b.t().contiguous().t()  # the kernel needs b in column-major order
    unit = torch.ones_like(scale)
    y = torch._scaled_mm(a.contiguous(), columns, 1 / scale, unit, out_dtype=torch.float32)
    return y[:m, :n].to(dtype)


def _to_tiles(x: Tensor) -> tuple[int, int, int, int]:
    return (0, -x.shape[1] % TILE, 0, -x.shape[0] % TILE)


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, layer: "Fp8Linear", dtype: torch.dtype) -> Tensor:
        (x8, s_x), (w8, s_w) = layer.cast_x(x), layer.cast_w(w)
        ctx.save_for_backward(x8, w8, s_x, s_w)
        ctx.layer, ctx.dtypes = layer, (x.dtype, w.dtype)
        return fp8_matmul(x8, w8.t(), s_x * s_w, dtype, layer.simulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x8, w8, s_x, s_w), simulate = ctx.saved_tensors, ctx.layer.simulate
        g8, s_g = ctx.layer.cast_g(gradients[0])
        dx = dw = None  # a first layer's input and frozen weights need no gradient
        if ctx.needs_input_grad[0]:
            dx = fp8_matmul(g8, w8, s_g * s_w, ctx.dtypes[0], simulate)
        if ctx.needs_input_grad[1]:
            dw = fp8_matmul(g8.t(), x8, s_g * s_x, ctx.dtypes[1], simulate)
        return dx, dw, None, None


class Fp8Linear(nn.Module):
    """An nn.Linear with 8-bit matmuls: x [..., k] -> x wᵀ + b [..., n], in the dtype of x or of the
    enclosing autocast region. Weight and bias are the parameters of `linear`. Each tensor is scaled
    by its amax, or by the largest amax of `history` previous calls. `simulate`: round to 8 bits and
    multiply in fp32; None: simulate unless the device is a GPU.

    Raises ValueError without `simulate` if the GPU has no 8-bit matmuls (they need compute
    capability 8.9); in backward, if recompute reruns a forward that uses `history`."""

    def __init__(self, linear: nn.Linear, history: int = 0, simulate: bool | None = None) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        device = linear.weight.device
        self.simulate = device.type != "cuda" if simulate is None else simulate
        check_has_fp8(device, self.simulate)
        self.cast_x = Fp8Cast(E4M3, history).to(device)
        self.cast_w = Fp8Cast(E4M3, history).to(device)
        self.cast_g = Fp8Cast(E5M2, history).to(device)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1  # same test as torch's checkpoint
        if in_backward and self.training and len(self.cast_x.amaxes):
            raise ValueError(
                "Fp8Linear: backward recomputes this layer's forward, and with "
                f"history={len(self.cast_x.amaxes)} the second run would use different scales, so "
                "the gradients would be wrong; use history=0, or do not recompute this layer"
            )
        dtype = autocast_dtype(x) or x.dtype
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, self.in_features)
            y = _Fp8Matmul.apply(rows, self.weight, self, dtype)
            y = y.view(*x.shape[:-1], self.out_features)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        how = "simulated" if self.simulate else "torch._scaled_mm"
        return f"in_features={self.in_features}, out_features={self.out_features}, {how}"


def check_has_fp8(device: torch.device, simulate: bool) -> None:
    """Raises ValueError if `device` has no fp8 matmul, unless `simulate`."""
    if simulate:
        return
    if device.type != "cuda":
        raise ValueError(
            f"torch multiplies in 8 bits on CUDA devices only, not on {device}; use simulate=True"
        )
    if (has := torch.cuda.get_device_capability(device)) < CAPABILITY:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {has[0]}.{has[1]}, but "
            f"matmuls in 8 bits need {CAPABILITY[0]}.{CAPABILITY[1]}; use bfloat16 (autocast), or "
            "simulate=True, which rounds identically but is slower"
        )


def use_fp8(
    model: nn.Module, only: str = "*", history: int = 0, simulate: bool | None = None
) -> list[str]:
    """Replace each nn.Linear of `model` whose name matches the pattern `only` with an Fp8Linear;
    return the names. It is common to exclude the first and last layers. Parameters stay the same
    objects; shared layers stay shared. Apply strategies afterward. Raises ValueError if no name
    matches or a layer has hooks.

    >>> use_fp8(model, only="blocks.*")
    """
    linears = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if name and type(module) is nn.Linear and fnmatch.fnmatchcase(name, only)
    ]
    if not linears:
        names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        raise ValueError(
            f"no nn.Linear of {type(model).__name__} matches {only!r}; choose one of {names[:8]}"
        )
    for name, linear in linears:
        if any(hooks for key, hooks in vars(linear).items() if key.endswith("_hooks")):
            raise ValueError(
                f"{name} has hooks, which an Fp8Linear would not call; call use_fp8 before "
                "strategies and other edits that put hooks on modules"
            )
    layers = {linear: Fp8Linear(linear, history, simulate) for _, linear in linears}
    for name, linear in linears:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layers[linear])
    return [name for name, _ in linears]
