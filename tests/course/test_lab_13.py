"""Lab 13's chain of layers: any sharding equals one process, and sends the bytes of the table."""

from collections.abc import Sequence
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from labkit import Comm, World, listen
from labkit.labs.lab_13 import chain
from labkit.labs.lab_13.chain import TRAVELS, in_turns, run_chain, sent_bytes

W, C, R = "whole", "columns", "rows"
EVERY_PAIR = [W, C, C, R, R, W, R, C, W]


def cut(ways: Sequence[str], without: str = "") -> tuple[tuple[Tensor, Tensor], int]:
    """Runs on a rank: output and gradient, and the bytes sent; `without` one operator."""
    name = without or "copy_to_ranks"
    instead = (lambda x, comm, **_: x) if without else chain.copy_to_ranks
    with patch.object(chain, name, instead), listen() as events:
        found = run_chain(Comm(), ways)
    return found, sum(event.bus_bytes for event in events)


@pytest.fixture(scope="module")
def whole(world2: World) -> tuple[Tensor, Tensor]:
    found, sent = world2.run(cut, [W] * 9)[0]
    assert sent == 0
    return found


def test_every_pair_has_all_pairs_of_the_table() -> None:
    assert set(pairwise([W, *EVERY_PAIR, W])) == set(TRAVELS)


@pytest.mark.parametrize("ways", [EVERY_PAIR, in_turns()], ids=["every pair", "in turns"])
def test_a_sharded_chain_equals_one_process(
    world2: World, whole: tuple[Tensor, Tensor], ways: list[str]
) -> None:
    for found, sent in world2.run(cut, ways):
        torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-3)
        assert sent == sent_bytes(ways)


@pytest.mark.parametrize("operator", ["copy_to_ranks", "reduce_from_ranks"])
def test_a_missing_operator_is_detected(
    world2: World, whole: tuple[Tensor, Tensor], operator: str
) -> None:
    for found, sent in world2.run(cut, EVERY_PAIR, operator):
        assert not all(torch.allclose(a, b, 1e-3, 1e-3) for a, b in zip(found, whole))
        assert sent < sent_bytes(EVERY_PAIR)
