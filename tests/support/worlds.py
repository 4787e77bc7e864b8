"""Worlds that the tests of a file share, and tests that run on every rank of one."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from labkit import World


def world_fixture(size: int = 0, sizes: Sequence[Any] | None = None, **options: Any) -> Any:
    """A fixture: `World(size, **options)` for the tests of a file, or one for each of `sizes`."""

    @pytest.fixture(scope="module", params=sizes, ids=sizes and (lambda n: f"{n} ranks"))
    def world(request: pytest.FixtureRequest) -> "Iterator[World]":
        from labkit import World

        with World(getattr(request, "param", size), **options) as world:
            yield world

    return world


def on_each_rank(fixture: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs on each rank of the world that `fixture` gives, with its other arguments."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        world = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([world, *inspect.signature(body).parameters.values()])

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            given.pop(fixture).run(body, **given)

        test.__signature__ = signature
        return test

    return decorate


def on_ranks_of_its_own(size: int, **options: Any) -> Callable[..., Callable[..., None]]:
    """The test runs on each rank of a `World(size, **options)` that no other test has."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            from labkit import World

            with World(size, **options) as world:
                world.run(body, **kwargs)

        return test

    return decorate
