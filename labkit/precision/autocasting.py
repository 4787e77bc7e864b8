"""autocast: the model stays in fp32, and each op runs in a suitable dtype.

    weight  fp32 ── cast, once ──▶ bf16 ┐
                                        linear ──▶ bf16 ── gelu ──▶ bf16 ── ... loss ──▶ fp32
    input   fp32 ── cast ────────▶ bf16 ┘  low             input dtype          fp32

A function mode casts each op's inputs according to the device's policy (op_policy.py). Autograd
reverses the cast: the gradient of an fp32 weight is fp32. A weight is cast once per region, and the
copy lives until the region ends. Per element, the weight takes 4 bytes, its gradient 4 and the
copy 2. The region also enables torch's autocast, which casts the ops inside a call of einsum.

Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.3; torch.amp.
"""

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from labkit.dispatch import autocast_dtype
from labkit.precision.op_policy import POLICIES
from labkit.precision.shadow_optimizer import LOW

Casts = dict[tuple[Any, ...], tuple[torch.Tensor, int, torch.Tensor]]


class autocast(ContextDecorator):
    """Runs each op in the region in `dtype` (torch.bfloat16 or torch.float16) or in fp32, as chosen
    by the device's policy. `device_type`: cast only on "cpu" or on "cuda"; None: on both.
    `enabled=False`: run ops in their input dtypes, even inside an enabled region.

    A region is reusable, can decorate a function and can nest, even with torch.autocast: the
    innermost region wins. Call `backward` outside the region: it uses forward's dtypes. Raises
    ValueError for a dtype that autocast or the device does not support.

    >>> with autocast(torch.bfloat16):
    ...     value = loss(model(batch.x), batch)
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        device_type: str | None = None,
        *,
        enabled: bool = True,
    ):
        if isinstance(dtype, str):
            raise ValueError(
                f"autocast takes the dtype first, as autocast({device_type or torch.bfloat16}, "
                f"{dtype!r}); without device_type, it casts on all devices"
            )
        self.dtype, self.device_type, self.enabled = dtype, device_type, enabled
        self._entered: list[ExitStack] = []

    def _recreate_cm(self) -> "autocast":
        """Return a new region for each call of a decorated function, for use by several threads."""
        return autocast(self.dtype, self.device_type, enabled=self.enabled)

    def __enter__(self) -> None:
        if self.enabled:
            check_low_type(self.dtype, self.device_type)
        with ExitStack() as stack:
            for kind in POLICIES:
                if self.device_type in (None, kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))  # restored on exit
                    torch.set_autocast_enabled(kind, self.enabled)
                    if self.enabled:
                        torch.set_autocast_dtype(kind, self.dtype)
            if self.enabled and not _open_regions():
                stack.enter_context(_Casting())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().close()


class _Casting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.bfloat16  # the low dtype of the current call
        self.casts: Casts = {}  # cached casts of weights
        self.entered_again = _Casting  # recompute enters a new mode, with no cached casts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        floats = [x for x in tensors_in((args, kwargs)) if _may_be_cast(x)]
        if not floats or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        self.dtype = torch.get_autocast_dtype(floats[0].device.type)
        match POLICIES[floats[0].device.type].of(op := _name(func)):
            case "low":
                to = self.dtype
            case "fp32":  # softmax(x, dtype=...) then casts to that dtype
                to = torch.float32
            case "promote":
                to = torch.float32 if any(x.dtype == torch.float32 for x in floats) else self.dtype
            case "refused":
                raise ValueError(
                    f"{op} is not safe in {self.dtype}: values near 1 round to 1, and log(1 - 1) "
                    "is infinite; use binary_cross_entropy_with_logits without a sigmoid, or "
                    "fp32 inputs inside autocast(enabled=False)"
                )
            case _:
                return func(*args, **kwargs)
        return func(*self._all_cast(args, to), **self._all_cast(kwargs, to))

    def _all_cast(self, nested: Any, to: torch.dtype) -> Any:
        if isinstance(nested, torch.Tensor):
            if not _may_be_cast(nested):
                return nested
            return self._cast(nested, to) if torch.is_autocast_cache_enabled() else nested.to(to)
        if type(nested) in (list, tuple):
            return type(nested)(self._all_cast(x, to) for x in nested)
        if type(nested) is dict:
            return {key: self._all_cast(x, to) for key, x in nested.items()}
        return nested

    def _cast(self, x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        is_weight = x.is_leaf and x.requires_grad and x.dtype == torch.float32 and not x._is_view()
        if x.dtype == to or not is_weight or to == torch.float32:
            return x.to(to)
        # A copy is reused only in the same grad mode, and only until the weight changes.
        key = (id(x), torch.is_grad_enabled(), to)
        _, version, copy = self.casts.get(key, (x, None, x))
        if version != x._version:
            copy = x.to(to)
            self.casts[key] = x, x._version, copy  # keeps x alive: its id stays unique
        return copy


def _open_regions() -> list[_Casting]:
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _Casting)]


def _may_be_cast(x: torch.Tensor) -> bool:
    return x.device.type in POLICIES and autocast_dtype(x) is not None


def tensors_in(nested: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for x in nested:
            yield from tensors_in(x)
    elif isinstance(nested, dict):
        yield from tensors_in(list(nested.values()))


def _name(func: Callable[..., Any]) -> str:
    """The dispatcher's op name: "matmul" for x @ y. In-place ops (`exp_`) are in no policy."""
    name = getattr(func, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    return name.removeprefix("special_")


def check_low_type(dtype: torch.dtype, device_type: str | None) -> None:
    """Raise ValueError unless autocast supports both and the device can run matmuls in `dtype`."""
    if device_type not in (None, *POLICIES):
        raise ValueError(
            f"autocast has no op policy for {device_type!r}; choose one of {', '.join(POLICIES)}"
        )
    if dtype not in LOW:
        advice = "use torch.bfloat16, or torch.float16 with a GradScaler"
        if dtype.is_floating_point and dtype.itemsize == 1:
            advice = (
                "matmuls in 8 bits need a scale for each tensor: use labkit.use_fp8(model) inside "
                "autocast(torch.bfloat16)"
            )
        raise ValueError(f"autocast cannot run ops in {dtype}; {advice}")
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("this machine has no CUDA device; omit device_type, or use 'cpu'")
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ValueError(
                f"{torch.cuda.get_device_name()} has no bfloat16 (it needs compute capability "
                "8.0); use torch.float16 with a GradScaler"
            )
        return
    try:
        torch.ones(1, 1, dtype=dtype) @ torch.ones(1, 1, dtype=dtype)
    except RuntimeError as error:
        raise ValueError(
            f"torch has no matmul in {dtype} on this CPU; use torch.bfloat16 ({error})"
        ) from None
