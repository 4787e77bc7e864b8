"""Worlds that the mutations of one file share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from labkit import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[..., World]]:
    """`worlds(size, **options)`: the same world for the same arguments."""
    with ExitStack() as stack:
        made: dict[Any, World] = {}

        def world(size: int, **options: Any) -> World:
            key = (size, *sorted(options.items()))
            if key not in made:
                made[key] = stack.enter_context(World(size, **options))
            return made[key]

        yield world
