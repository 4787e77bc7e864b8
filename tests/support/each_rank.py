"""A test whose body runs on every rank of a world."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def on_each_rank(fixture: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs on each rank of the world that `fixture` gives, with its other arguments."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        world = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([world, *inspect.signature(body).parameters.values()])

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            given.pop(fixture).run(body, **given)

        test.__signature__ = signature  # type: ignore[attr-defined]
        return test

    return decorate
