"""Why a layout loses: cases of which the cause is known, one for each part of a step."""

from dataclasses import replace

import pytest

from labkit import Layout, cluster
from labkit.replaying.planning.report import PARTS, cause, reached, seconds, why, why_not
from plan_cases import step_of
from tables import cases

SELENE = cluster("selene")
AS_BEST = {"compute": 8, "tensor": 1, "bubble": 0.5, "data": 0.25, "pipeline": 0.25}
SENT = {"tensor": 4e9, "data": 2e9, "pipeline": 1e9}
BEST = step_of(Layout(tp=8, pp=2, dp=4), **AS_BEST, sent=SENT)


@cases(
    (Layout(tp=16, pp=1, dp=4), {"tensor": 7}, "tensor",
     "tp 16 leaves the node of 8: its collectives go over InfiniBand HDR and stand exposed 44% of "
     "the step (the best: 10%)"),
    (Layout(tp=4, pp=4, dp=4), {"tensor": 3}, "tensor",
     "collectives of tp 4 stand exposed 25% of the step (the best: 10%); a rank sends 8.0 GB, 2.0 "
     "× the best's"),
    (Layout(tp=2, pp=8, dp=4), {"bubble": 5.5}, "bubble",
     "bubble 37%: pp - 1 = 7 over 16 micro-batches (the best: 5.0%, pp - 1 = 1 over 16 "
     "micro-batches)"),
    (Layout(tp=2, pp=8, dp=4, microbatch=16, chunks=2), {"bubble": 5.5}, "bubble",
     "pp - 1 = 7 over 1 micro-batch in 2 chunks"),
    (Layout(tp=1, pp=1, dp=64), {"data": 2.75}, "data",
     "gradients of dp 64 stand exposed 22% of the step (the best: 2.5%); a rank sends 8.0 GB, 4.0 "
     "× the best's"),
    (Layout(tp=1, pp=16, dp=4, chunks=2), {"pipeline": 1.25}, "pipeline",
     "messages between 32 pieces of the model on 16 stages stand exposed 11% of the step"),
    (Layout(tp=8, pp=2, dp=4, recompute="full"), {"compute": 10.6}, "compute",
     "computes every block's forward twice: 10.60 s of computing instead of 8.00"),
    (Layout(tp=8, pp=2, dp=4, zero=0), {"optimizer": 0.4}, "optimizer",
     "the optimizer takes 400 ms, the best's 0"),
)  # fmt: skip
def test_largest_difference_decides(layout: Layout, seconds: dict, part: str, words: str) -> None:
    best = replace(BEST, layout=replace(BEST.layout, zero=1))
    sent = {"tensor": 8e9, "data": 8e9, "pipeline": 1e9}
    other = step_of(layout, **AS_BEST | seconds, sent=sent)
    assert cause(best, other) == part
    assert words in why(best, other, SELENE)


def test_smaller_matmuls_are_reported_with_the_share_of_peak_they_reach() -> None:
    best = step_of(Layout(tp=4, dp=4, microbatch=4), compute=8, tensor=2, mfu=0.48)
    other = step_of(Layout(tp=8, dp=2, microbatch=1), compute=12, tensor=2, mfu=0.48 * 10 / 14)
    assert reached(best) == pytest.approx(0.6) and reached(other) == pytest.approx(0.4)
    assert why(best, other, SELENE) == (
        "smaller products: with tp 8 and b 1 they reach 40% of the peak, the best's with tp 4 and "
        "b 4 60%"
    )


def test_recomputing_counts_as_computing_and_not_as_a_smaller_product() -> None:
    layout = Layout(tp=4, dp=4)
    best = step_of(layout, compute=9, mfu=0.6)
    again = step_of(replace(layout, recompute="full"), compute=12, mfu=0.45)
    assert reached(again) == pytest.approx(reached(best)) == pytest.approx(0.6)
    assert "twice" in why(best, again, SELENE)
    slow = step_of(replace(layout, recompute="full", microbatch=1), compute=24, mfu=0.225)
    assert "smaller products" in why(best, slow, SELENE), "recomputing explains 6 of 15 s"


def test_equally_fast_layouts_differ_by_memory_and_nearly_equal_ones_say_so() -> None:
    twin = replace(BEST, layout=replace(BEST.layout, sequence=True), memory_bytes={"other": 3.5e9})
    assert why(BEST, twin, SELENE) == "as fast; a device holds 2.5 GB more"
    assert why(BEST, BEST, SELENE) == "the best"
    near = step_of(Layout(tp=8, pp=1, dp=8), **AS_BEST | {"data": 0.28})
    assert why(BEST, near, SELENE).startswith("all but as fast: gradients of dp 8")


def test_a_tp_past_the_node_blames_the_wire_only_where_the_best_stays_inside() -> None:
    outside = step_of(Layout(tp=16, dp=4), **AS_BEST)
    further = step_of(Layout(tp=32, dp=2), **AS_BEST | {"tensor": 9})
    assert "leaves the node" in why(BEST, further, SELENE)
    assert "leaves the node" not in why(outside, further, SELENE)


def test_a_model_that_does_not_fit_is_reported_with_the_excess_and_the_largest_holder() -> None:
    assert sum(seconds(BEST).values()) == BEST.step_s and tuple(seconds(BEST)) == PARTS
    held = {"parameters": 20e9, "activations": 61e9, "gradients": 15.3e9}
    assert why_not(held, 80e9) == "does not fit: 96.3 GB of 80.0 GB, activations 61.0"
    barely = why_not(held, sum(held.values()) - 2e7)
    assert barely == "does not fit: 96.300 GB of 96.280 GB, activations 61.0"
