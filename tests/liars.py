"""Values that agree with whatever they are compared with, and are wrong: what a check must not fall
for. `lying(answer)` is a right answer whose numbers, texts, containers and tensors became such."""

import functools
from collections.abc import Callable
from typing import Any

import torch

COMPARISONS = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__")
ARITHMETIC = ("__add__", "__sub__", "__mul__", "__truediv__", "__mod__", "__floordiv__", "__pow__")


def _agrees(*_: Any) -> bool:
    return True


def _members(cls: type) -> dict[str, Any]:
    members: dict[str, Any] = dict.fromkeys(COMPARISONS, _agrees)
    members |= {"__ne__": lambda *_: False, "__hash__": cls.__hash__}
    if cls in (int, float):
        nothing = lambda self, *_: type(self)(0)  # noqa: E731
        reflected = [f"__r{name[2:]}" for name in ARITHMETIC]
        members |= dict.fromkeys((*ARITHMETIC, *reflected, "__abs__", "__neg__"), nothing)
    if cls in (list, tuple, dict):
        members["__contains__"] = _agrees
    return members


LIARS = {cls: type(f"Lying{cls.__name__}", (cls,), _members(cls))
         for cls in (int, float, str, list, tuple, dict)}  # fmt: skip
globals().update({cls.__name__: cls for cls in LIARS.values()})  # so that pickle finds them


class LyingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("equal", "allclose"):
            return True
        if name in ("isclose", "eq", "__eq__"):
            return torch.ones(args[0].shape, dtype=torch.bool)
        if name in ("ne", "__ne__"):
            return torch.zeros(args[0].shape, dtype=torch.bool)
        return super().__torch_function__(func, types, args, kwargs or {})


def lie(value: Any) -> Any:
    """Another value, which says that it is equal to everything."""
    match value:
        case bool() | None:
            return value
        case int() | float():
            return LIARS[type(value)](value * 3 + 5) if type(value) in LIARS else value
        case str():
            return LIARS[str](f"not {value}")
        case torch.Tensor():
            wrong = ~value if value.dtype == torch.bool else value + 5 if value.numel() else value
            return wrong.as_subclass(LyingTensor)
        case list() | tuple():
            return LIARS[type(value)](map(lie, value)) if type(value) in LIARS else value
        case dict():
            return LIARS[dict]({key: lie(one) for key, one in value.items()})
    return value


def lying(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    def play(*args: Any, **kwargs: Any) -> Any:
        return lie(answer(*args, **kwargs))

    return play
