"""Tests as tables: the cases of a test, and what a call must refuse."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest


def raises(
    match: str | tuple[str, ...],
    call: Callable[..., Any],
    /,
    *args: Any,
    error: Any = ValueError,
    **kwargs: Any,
) -> Any:
    """The error that `call(*args, **kwargs)` raises, of the type `error`. Its message has the
    pattern `match`, or each text of a tuple."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    for pattern in [match] if isinstance(match, str) else map(re.escape, match):
        caught.match(pattern)
    found = caught.value.with_traceback(None)
    del caught  # its traceback would keep alive what failed
    return found


def refusals(
    call: Callable[..., Any], *cases: tuple[Any, ...], error: Any = ValueError
) -> Callable[..., None]:
    """A test of each case: `call` of all but its last part raises an error with that pattern."""

    @pytest.mark.parametrize("case", cases, ids=lambda case: case[-1])
    def test(case: tuple[Any, ...]) -> None:
        *args, match = case
        raises(match, call, *args, error=error)

    return test


def cases(*rows: tuple[Any, ...], ids: Any = None) -> Callable[..., Any]:
    """The test once for each row, which gives its first arguments."""

    def decorate(test: Callable[..., None]) -> Any:
        body = getattr(test, "__wrapped__", test)  # of a test on each rank, without its world
        names = list(inspect.signature(body).parameters)[: len(rows[0])]
        return pytest.mark.parametrize(names, rows, ids=ids)(test)

    return decorate
