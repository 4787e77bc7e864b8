"""What context parallelism sends, and when it is hidden: the published bound, and a replay."""

from functools import cache
from typing import Any

import pytest
import torch

from labkit import Comm, dry_run, replay
from labkit.clusters import Cluster, Device, Level
from labkit.parallel.context.ring_attention import ring_attention
from labkit.predict.context import (
    ring_attention_bytes,
    ring_exposed_s,
    ring_hides_from,
    ring_step_scores,
    ulysses_bytes,
)
from labkit.trace import Trace

HEADS, GROUPS, WIDTH, ROWS = 4, 2, 8, 2
FLOPS_PER_S = 1e9


def test_ulysses_sends_less_with_more_ranks_and_the_ring_does_not() -> None:
    """arXiv 2309.14509, section 3: 4/n of an activation, where the ring's sum stays."""
    shape = {"sequence": 8192, "rows": 1, "kv_heads": 64, "head_width": 128}
    ring = [ring_attention_bytes(**shape, ranks=n) for n in (2, 4, 64)]
    ulysses = [ulysses_bytes(**shape, heads=64, ranks=n) for n in (2, 4, 64)]
    assert ring[0] < ring[1] < ring[2] < 2 * ring[0]
    assert ulysses[0] > ulysses[1] > ulysses[2]
    assert [64 * 2 * y // 2 // n for y, n in zip(ring, (2, 4, 64))] == [32 * y for y in ulysses]


def test_all_ranks_together_compute_every_score_once() -> None:
    ranks, block = 8, 96
    own, other = (ring_step_scores(block, heads=3, rows=2, own=own) for own in (True, False))
    whole = ranks * block
    assert ranks * (own + (ranks - 1) * other) == 2 * 3 * whole * (whole + 1) / 2


def test_the_block_from_which_on_the_ring_hides_is_the_published_one() -> None:
    """arXiv 2310.01889, section 3: c = F / B, for 2-byte types; a causal mask doubles it."""
    shape = {"flops_per_s": 312e12, "bytes_per_s": 300e9}  # an A100 over NVLink, table 2
    found = ring_hides_from(heads=32, kv_heads=32, head_width=128, **shape)
    assert found == pytest.approx(2 * 312e12 / 300e9)
    whatever_the_width = ring_hides_from(32, 32, 64, rows=7, **shape)
    assert found == pytest.approx(whatever_the_width)
    assert found / 4 == pytest.approx(ring_hides_from(32, 8, 128, **shape)), "grouped queries"
    assert found < ring_hides_from(32, 32, 128, alpha_s=1e-5, **shape)


def exposed_s(ranks: int, bytes_per_s: float, alpha_s: float) -> list[float]:
    """Of a rank, in forward and in backward, where products alone take time."""
    device = Device("plain", {"float32": FLOPS_PER_S}, 1e9, 1e30, 0.0)
    wire = Level("wire", bytes_per_s, alpha_s, ranks)
    on = replay(recorded(ranks), Cluster("plain", "one node", device, 1, ranks, wire, wire))
    waits = [event.wait_ended_s - event.wait_began_s for event in on.ranks[0].comms]
    assert len(waits) == 3 * (ranks - 1)
    return [sum(waits[: ranks - 1]), sum(waits[ranks - 1 :])]


BLOCK = 4


@cache
def recorded(ranks: int) -> Trace:
    """One layer's attention. Tiles of one query and one key: none computes what a mask hides."""

    def attend() -> None:
        shapes = (HEADS, GROUPS, GROUPS)
        q, k, v = (torch.zeros(ROWS, h, BLOCK, WIDTH, requires_grad=True) for h in shapes)
        ring_attention(q, k, v, Comm(), tile=1).sum().backward()

    return dry_run(attend, ranks=ranks, step=0)


SHAPE: dict[str, Any] = {
    "heads": HEADS, "kv_heads": GROUPS, "head_width": WIDTH, "rows": ROWS,
    "flops_per_s": FLOPS_PER_S, "element_bytes": 4,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("alpha_s", [0.0, 1e-7])
@pytest.mark.parametrize("of_the_way", [0.1, 0.5, 0.95, 1.0, 4.0])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_exposed_communication_in_a_replay_is_the_prediction(
    ranks: int, of_the_way: float, alpha_s: float
) -> None:
    """With wires so fast that a step's computing is so much of a block's way."""
    step_s = ring_step_scores(BLOCK, HEADS, ROWS) * 4 * WIDTH / FLOPS_PER_S
    elements = 2 * ROWS * GROUPS * BLOCK * WIDTH
    bytes_per_s = elements * 4 / (step_s / of_the_way - alpha_s)
    how = {**SHAPE, "bytes_per_s": bytes_per_s, "alpha_s": alpha_s}
    found = exposed_s(ranks, bytes_per_s, alpha_s)
    predicted = [ring_exposed_s(BLOCK, ranks=ranks, **how, backward=b) for b in (False, True)]
    assert found == pytest.approx(predicted, rel=1e-6, abs=1e-12)
    hidden = ring_hides_from(**how) * (1 - 1e-9) <= BLOCK
    assert hidden == (of_the_way >= 1)
    if ranks > 2 or hidden:  # of two ranks the one block has the own step, which is longer
        assert (found[0] < 1e-12) == hidden, "zero where it says so"
