"""ZeRO-1 and 2: single-process training, the bytes of the formula, and nothing held that is not
this rank's."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from data_parallel_contract import CASES, OPTIMIZERS, Strategy, check_equal_to_single
from torch import nn

from labkit import World, ZeroOptimizer
from labkit.parallel.footprint import Footprint

SHARDED = {1: ("optimizer_bytes",), 2: ("gradient_bytes", "optimizer_bytes")}


def unwrapped(module: nn.Module) -> nn.Module:
    return module


def zero(
    stage: int, make: Any = ZeroOptimizer, bucket_mb: float = 0.01, **options: Any
) -> Strategy:
    """ZeRO as the contract wants it, in several buckets."""

    def predict(module: nn.Module, size: int, rank: int) -> Footprint:
        return ZeroOptimizer.predict(module, size, stage, bucket_mb, rank)

    optimizer = partial(make, stage=stage, bucket_mb=bucket_mb, **options)
    return Strategy(unwrapped, optimizer, predict, SHARDED[stage])


SIZES = [pytest.param(n, marks=pytest.mark.slow) if n in (1, 4) else n for n in (1, 2, 3, 4)]


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size} ranks")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, timeout_s=20) as world:
        yield world


stages = pytest.mark.parametrize("stage", [1, 2])


@stages
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_equal_single_process_training(
    world: World, stage: int, case: str, optimizer: str
) -> None:
    check_equal_to_single(world, zero(stage), case, optimizer)
