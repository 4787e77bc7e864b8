"""Failures of a check: one sentence, expected and found values, and a hint."""

import inspect
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import torch

BOLD_RED, PLAIN = "\x1b[1;31m", "\x1b[0m"


class CheckFailed(AssertionError):
    """Raised for a wrong answer. A notebook shows its message without a traceback."""

    def __init__(
        self, sentence: str, expected: str = "", found: str = "", hint: str = "", details: str = ""
    ):
        self.sentence, self.details = sentence, details
        self.expected, self.found, self.hint = expected, found, hint
        self.exercise = ""  # "00.average", set by the exercise that failed
        super().__init__(sentence)

    def __str__(self) -> str:
        title = f"{self.exercise}: " if self.exercise else ""
        lines = [title + self.sentence, *self.details.splitlines()]
        for name in ("expected", "found", "hint"):
            if text := getattr(self, name):
                lines.append(f"  {name + ':':<9} {text}")
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """For a notebook: only the message, because the traceback shows no student code."""
        first, *others = str(self).split("\n")
        return [f"{BOLD_RED}✗ {first}{PLAIN}", *others]


def fail(
    sentence: str, *, expected: Any = "", found: Any = "", hint: str = "", details: str = ""
) -> NoReturn:
    """Raise CheckFailed. `sentence`: what is wrong and where; `hint`: help without the solution."""
    raise CheckFailed(sentence, str(expected), str(found), hint, details)


def no_yield(student: Callable[..., Any]) -> None:
    """Fail for a generator function where an ordinary function is expected."""
    if inspect.isgeneratorfunction(student):
        fail(
            "your function has a `yield`, so its body never ran.",
            hint="Remove the `yield`, and return the result: comm.send(...) and comm.recv(...) "
            "wait by themselves.",
        )


def no_return(found: Any) -> str:
    """The hint for a function that returned None; "" for any other value."""
    return "Does the function end with a return?" if found is None else ""


def several(found: Any, count: int, what: str, expected: str, hint: str = "") -> None:
    """Fail unless `found` is a tuple or list of `count` values. The message begins with
    `what`, such as "f returned", and then shows the value."""
    if not isinstance(found, (tuple, list)) or len(found) != count:
        fail(f"{what} {brief(found)}.", expected=expected, hint=hint)


def equal(
    found: Sequence[Any],
    expected: Sequence[Any],
    what: str = "returned",
    hint: str = "",
    within: float = 1e-6,
) -> None:
    """Compare one value per rank; fail at the first rank that differs.

    Values are numbers, tensors (shape and dtype must match), strings, or tuples and lists of these.
    `what` is the verb in "rank 1 returned 6.0; expected 1.5"; `within`: the allowed difference,
    relative and absolute (integers must be equal); `hint` is for values of the expected type."""
    assert len(found) == len(expected), "one value per rank"
    for rank, (value, right) in enumerate(zip(found, expected)):
        if value is None and right is not None:
            why = no_return(value) if what == "returned" else hint
            fail(f"rank {rank} {what} None.", expected=brief(right), hint=why)
        if problem := difference(value, right, within):
            fail(
                f"rank {rank} {what} {problem}.",
                expected=f"{brief(right)} on rank {rank}",
                found=brief(value),
                hint=hint if _same_sort(value, right) else "",
            )


def _same_sort(found: Any, right: Any) -> bool:
    for sort in (torch.Tensor, (tuple, list), str):
        if isinstance(right, sort):
            return isinstance(found, sort)
    return isinstance(plain(found), (int, float))


def plain(value: Any) -> Any:
    """The number in a numpy scalar or a one-element tensor or array; any other value unchanged."""
    single = isinstance(value, torch.Tensor) and value.numel() == 1
    single |= isinstance(value, (np.generic, np.ndarray)) and value.size == 1
    return value.item() if single else value


EXACT: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__, float: float.__pos__, str: str.__str__, list: list.__iter__,
    tuple: tuple.__iter__, dict: dict.items,
    torch.Tensor: lambda x: torch.Tensor.as_subclass(x, torch.Tensor),
}  # fmt: skip
KNOWN = ("builtins", "labkit", "torch", "numpy")  # packages with trusted subclasses


def honest(value: Any) -> Any:
    """Convert `value`, and everything in it, to the exact types that a check compares: a student's
    subclass could claim to equal anything."""
    known = type(value).__module__.partition(".")[0] in KNOWN
    for base, exact in EXACT.items():
        if issubclass(type(value), base):
            if base in (list, tuple, dict):
                old = list(exact(value))
                new = [honest(x) for x in old]
                if known and all(map(operator.is_, old, new)):
                    return value
                return tuple.__new__(type(value), new) if known and base is tuple else base(new)
            with torch._C.DisableTorchFunctionSubclass():
                return value if known else exact(value)
    return value


def difference(found: Any, right: Any, within: float) -> str:
    """How `found` differs from `right`; "" if they are equal."""
    found = honest(found)
    if isinstance(right, torch.Tensor):
        return _tensor_difference(found, right, within)
    if isinstance(right, (tuple, list)):
        if not isinstance(found, (tuple, list)):
            return f"{kind(found)}; expected {kind(right)}"
        if len(found) != len(right):
            return f"{kind(found)} of length {len(found)}; expected length {len(right)}"
        for i, (value, expected) in enumerate(zip(found, right)):
            if problem := difference(value, expected, within):
                short = max(len(repr(found)), len(repr(right))) <= 40
                whole = f"{found!r}; expected {right!r}"
                return whole if short else f"{problem} (at index {i})"
        return ""
    found = plain(found)
    if isinstance(right, (int, float)) and not isinstance(right, bool):
        if not isinstance(found, (int, float)):
            return f"{kind(found)}; expected a number"
        exact = isinstance(right, int) and isinstance(found, int)
        close = found == right if exact else abs(found - right) <= within * max(1, abs(right))
    else:
        close = found == right
    return "" if close else f"{brief(found)}; expected {brief(right)}"


def _tensor_difference(found: Any, right: torch.Tensor, within: float) -> str:
    if not isinstance(found, torch.Tensor):
        return f"{kind(found)}; expected a tensor of shape {tuple(right.shape)}"
    if found.shape != right.shape:
        return f"a tensor of shape {tuple(found.shape)}; expected {tuple(right.shape)}"
    if found.dtype != right.dtype:
        return f"a tensor of {found.dtype}; expected {right.dtype}"
    wrong = ~torch.isclose(found.double(), right.double(), rtol=within, atol=within, equal_nan=True)
    if not wrong.any():
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"a tensor that differs in {int(wrong.sum())} of {wrong.numel()} elements: element "
        f"{list(place)} is {found[place].item():g}; expected {right[place].item():g}"
    )


def kind(value: Any) -> str:
    """The type of a value in words: "a tensor of shape (2,)", "a list", "None"."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def whole_numbers(found: Any, name: str, expected: str) -> list[int]:
    """The integers in the list that `name` returned; fails for anything else."""
    if isinstance(found, (torch.Tensor, range, tuple, list)):
        with suppress(TypeError):  # operator.index accepts only integers
            return [operator.index(x) for x in found]
    fail(f"{name} returned {brief(found)}.", expected=expected)


def brief(value: Any, most: int = 80) -> str:
    """The repr of a value, shortened to one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else text[: most - 4] + " ..."
