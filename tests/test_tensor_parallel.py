"""Tensor and sequence parallelism: the same model for every size, the bytes of the formula."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensor_contract import (
    check_equal_to_single,
    predicted,
    with_sequence,
)

from labkit import World
from labkit.parallel.tensor import tensor_parallel

WAYS = {"tensor": tensor_parallel, "sequence": with_sequence}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(
    scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))]
)
def world(request: Any) -> Iterator[World]:
    with World(request.param, timeout_s=20) as world:
        yield world


@ways
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_weights_losses_and_bytes(world: World, way: str, recompute: Any) -> None:
    runs = check_equal_to_single(world, WAYS[way], recompute)
    for run in runs:
        assert run.sent == predicted(world.size, way == "sequence", recompute == "full")


@ways
@pytest.mark.parametrize(
    "changes",
    [{"kv_heads": 6}, {"vocab": 257}, {"tied": False}],
    ids=["grouped queries", "odd vocabulary", "untied"],
)
def test_other_models(world: World, way: str, changes: dict[str, Any]) -> None:
    if world.size == 4 and "kv_heads" in changes:
        changes = {"kv_heads": 4}
    check_equal_to_single(world, WAYS[way], **changes)
