"""Tests as tables: the cases of a test, and what a call must refuse."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest


def raises(
    match: str, call: Callable[..., Any], /, *args: Any, error: Any = ValueError, **kwargs: Any
) -> Any:
    """The error that `call(*args, **kwargs)` raises, of the type `error`; the pattern `match` is in
    its message, where one is given."""
    with pytest.raises(error, match=match or None) as caught:
        call(*args, **kwargs)
    return caught.value


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
        names = list(inspect.signature(test).parameters)[: len(rows[0])]
        return pytest.mark.parametrize(names, rows, ids=ids)(test)

    return decorate
