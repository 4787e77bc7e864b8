"""Wrong values that agree with whatever they are compared with, and answers that return them."""

import functools
import inspect
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


def changed(value: Any, lies: bool) -> Any:
    """Another value; if it `lies`, one that says that it is equal to everything."""
    kind = LIARS[type(value)] if lies and type(value) in LIARS else type(value)
    match value:
        case int() | float() if type(value) in LIARS:
            return kind(value * 3 + 5)
        case str():
            return kind(f"not {value}")
        case torch.Tensor():
            other = ~value if value.dtype == torch.bool else value + 5
            return other.as_subclass(LyingTensor) if lies else other
        case list() | tuple() if type(value) in LIARS:
            return kind(changed(one, lies) for one in value)
        case dict():
            return kind({key: changed(one, lies) for key, one in value.items()})
    return value


def wrong(answer: Callable[..., Any], lies: bool) -> Callable[..., Any]:
    """`answer`, which returns, or yields, what is `changed`."""

    if inspect.isgeneratorfunction(answer):

        @functools.wraps(answer)
        def each(*args: Any, **kwargs: Any) -> Any:
            for value in answer(*args, **kwargs):
                yield changed(value, lies)

        return each

    @functools.wraps(answer)
    def play(*args: Any, **kwargs: Any) -> Any:
        return changed(answer(*args, **kwargs), lies)

    return play
