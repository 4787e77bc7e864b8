"""Lab 16's checks: the results of its replays, and the messages for a wrong run."""

import torch

from labkit.course import CheckFailed
from labkit.labs.lab_16 import checks as check
from labkit.labs.lab_16.scenarios import (
    JOBS,
    SHORT_W,
    held,
    idle,
    interleaved_after,
    layers,
    replayed_bubble,
    train_alone,
    weight_error,
)
from labkit.schedules import interleaved, one_f_one_b, peak_in_flight, zero_bubble_h1
from tables import raises


def test_a_list_of_warm_ups_is_a_schedule() -> None:
    """With Megatron-LM's warm-ups, arXiv 2104.04473, section 2.2.2, it equals the library's."""
    for p, m, v in [(1, 2, 2), (2, 4, 2), (4, 8, 3)]:
        counts = [min(2 * (p - 1 - r) + (v - 1) * p, m * v) for r in range(p)]
        assert interleaved_after(counts, m, v) == interleaved(p, m, v)


def test_idle_is_the_closed_form() -> None:
    assert idle(one_f_one_b(4, 8)) == 9
    assert idle(interleaved(4, 8, 2)) == 4.5
    assert idle(zero_bubble_h1(4, 8), SHORT_W) == 4.5
    assert held(interleaved(4, 8, 2)) == [5.5, 4.5, 3.5, 2.5]
    assert replayed_bubble(one_f_one_b(4, 8), JOBS["the memory of 1F1B"].costs) == 9 / 33


def test_half_a_warm_up_idles_more_only_if_messages_take_time() -> None:
    """As exercise 2 says: with free messages, it has the same bubble and holds less."""
    p, m, v = 4, 8, 2
    right = interleaved(p, m, v)
    half = interleaved_after([(v - 1) * p + p - 1 - r for r in range(p)], m, v)
    assert idle(half) == idle(right)
    assert max(peak_in_flight(half)) < max(peak_in_flight(right))
    assert idle(half, message_s=0.1) > idle(right, message_s=0.1)


def test_wrong_missing_and_duplicate_weights_are_reported() -> None:
    right = train_alone()
    names = list(right)
    halves = [{name: right[name] for name in half} for half in (names[:8], names[8:])]
    assert weight_error(halves, right) == ""
    off = [halves[0], halves[1] | {names[9]: right[names[9]] + 1e-3}]
    assert weight_error(off, right) == f"{names[9]} on rank 1 is off by 0.001"
    assert weight_error(halves[:1], right) == "the ranks have 8 weights, but the model has 16"
    assert weight_error([*halves, halves[0]], right).startswith("the ranks have 24 weights")
    says = "for this job, after a step on 4 ranks: "
    raises(says, check._check_weights, "this job", off, error=CheckFailed)


def test_a_step_changes_the_compared_weights() -> None:
    pairs = zip(train_alone().values(), layers().parameters())
    assert any(not torch.equal(after, before) for after, before in pairs)
