"""Which layouts there are: all that factor and no others, what is said where none does, and why a
layout loses: cases of which the cause is known, one for each part of a step."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from labkit import cluster
from labkit.replaying.planning.layout import Layout, Sizes, layouts
from labkit.replaying.planning.ranking import least_bytes
from labkit.replaying.planning.report import PARTS, cause, reached, seconds, why, why_not
from plan_cases import SMALL, step_of
from tables import cases, raises, refusals

GPT3 = Sizes(width=12288, depth=96, heads=96)
ODD = Sizes(width=64, depth=4, heads=4, context=7)


def by_trying(sizes: Sizes, ranks: int, rows: int) -> set[Layout]:
    found = set()
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    twos = [1, 2, 4, 8, 16]
    for tp, pp, dp in product(divisors, repeat=3):
        if tp * pp * dp != ranks or sizes.heads % tp or sizes.depth % pp or rows % dp:
            continue
        for b, chunks, zero, sequence in product(twos, twos, (0, 1), (False, True)):
            count, left = divmod(rows // dp, b)
            uneven = left or sizes.depth % (pp * chunks) or (chunks > 1 and count % pp)
            nothing = (chunks > 1 and pp == 1) or (zero and dp == 1) or (sequence and tp == 1)
            if not (uneven or nothing or (sequence and sizes.context % tp)):
                for recompute in ("none", "full"):
                    found.add(Layout(tp, pp, dp, b, chunks, zero, sequence, recompute))
    return found


@cases(
    *((SMALL, *one) for one in ((1, 1), (8, 16), (12, 12), (3, 9))),
    (Sizes(width=60, depth=6, heads=5, context=7), 30, 30),
    (Sizes(width=64, depth=16, heads=4, context=6), 16, 24),
    (ODD, 8, 8),
)
def test_all_layouts_that_factor_and_no_others(sizes: Sizes, ranks: int, rows: int) -> None:
    found = layouts(sizes, ranks, rows)
    assert set(found) == by_trying(sizes, ranks, rows)
    assert len(found) == len(set(found)) and all(one.ranks == ranks for one in found)


def test_named_values_are_those_alone() -> None:
    of_gpt3 = partial(layouts, GPT3, 1024, 1536)
    named = {"tp": (8, 4), "microbatch": [1, 2], "chunks": 1, "zero": 1, "sequence": True}
    assert set(of_gpt3(**named, recompute="full")) == {
        layout for layout in of_gpt3()
        if layout.tp in (4, 8) and layout.microbatch in (1, 2) and layout.chunks == 1
        and layout.zero == (layout.dp > 1) and layout.sequence and layout.recompute == "full"
    }  # fmt: skip
    assert {layout.microbatch for layout in of_gpt3(microbatch=3)} == {3}
    assert {layout.chunks for layout in of_gpt3(pp=8, chunks=(3, 6))} == {3, 6}


test_a_size_that_does_not_factor_is_reported_with_sizes_that_do = refusals(
    lambda asked: layouts(**{"sizes": GPT3, "ranks": 1024, "global_batch": 1536, **asked}),
    ({"tp": 5}, "tp=5: 96 heads are not divisible by 5; choose 1, 2, 3, 4, 6, 8, 12, 16, 24"),
    ({"pp": (2, 7)}, "pp=7: 96 blocks are not divisible by 7; choose 1, 2, 3"),
    ({"dp": 5}, "dp=5: 1536 rows are not divisible by 5"),
    ({"microbatch": 7}, "microbatch=7: 1536 rows"),
    ({"chunks": 9}, "chunks=9: 96 blocks"),
    ({"tp": 0}, "tp=0: choose a whole number, 1 or more"),
    ({"tp": ()}, "tp has no values to choose from"),
    ({"zero": 3}, "zero=3: choose 0 or 1"),
    ({"recompute": "selective"}, "recompute='selective': choose none or full"),
    ({"tp": 3}, "no layout of 1024 ranks: .*with tp 3; choose 864 or 1152 ranks"),
    ({"ranks": 1000}, "no layout of 1000 ranks: .*; choose 864 or 1024 ranks"),
    ({"ranks": 7}, "no layout of 7 ranks: .*; choose 6 or 8 ranks"),
    ({"ranks": 0}, "ranks=0: choose a whole number"),
    ({"global_batch": -1}, "global_batch=-1: choose a whole number"),
    (
        {"sizes": ODD, "ranks": 8, "global_batch": 8, "tp": (2, 4), "sequence": True},
        "sequence=True: 7 positions are not divisible by tp",
    ),
    ({"sizes": replace(ODD, width=100, heads=3)}, "width=100 is not divisible by heads=3"),
)


def test_the_ranks_that_would_do_do() -> None:
    for ranks in (864, 1024):
        assert layouts(GPT3, ranks, 1536)
    for ranks in range(865, 1024):
        raises("864 or 1024", layouts, GPT3, ranks, 1536)


def test_the_formulas_count_what_each_choice_is_for() -> None:
    """Twice the tp, half the states; ZeRO-1 cuts the optimizer's alone; 1F1B holds pp
    micro-batches of depth / pp blocks; interleaved (1 + (pp - 1) / (pp chunks)) as much."""
    plain = least_bytes(GPT3, Layout(tp=8, pp=8, dp=16), 1536)
    matrices = 12 * 12288**2 * 12 + 51200 * 12288
    assert plain["parameters"] == plain["gradients"] == 2 * matrices / 8
    assert plain["optimizer state"] == 12 * matrices / 8
    zero = least_bytes(GPT3, Layout(tp=8, pp=8, dp=16, zero=1), 1536)
    assert zero == {**plain, "optimizer state": plain["optimizer state"] / 16}
    full = Layout(tp=8, pp=8, dp=16, recompute="full")
    kept = 2 * 2048 * 12288  # the input of a block
    assert least_bytes(GPT3, full, 1536)["activations"] == kept * 96
    interleaved = Layout(tp=8, pp=8, dp=16, chunks=2, recompute="full")
    assert least_bytes(GPT3, interleaved, 1536)["activations"] == kept * 96 * (1 + 7 / 16)
    few = least_bytes(GPT3, full, 4 * 16)  # 4 micro-batches never fill 8 stages
    assert few["activations"] == kept * 96 / 2


SELENE = cluster("selene")
AS_BEST = {"compute": 8, "tensor": 1, "bubble": 0.5, "data": 0.25, "pipeline": 0.25}
SENT = {"tensor": 4e9, "data": 2e9, "pipeline": 1e9}
BEST = step_of(Layout(tp=8, pp=2, dp=4), **AS_BEST, sent=SENT)


@cases(
    (Layout(tp=16, pp=1, dp=4), {"tensor": 7}, "tensor",
     "tp 16 leaves the node of 8: its collectives go over InfiniBand HDR and are exposed for 44% "
     "of the step (best: 10%)"),
    (Layout(tp=4, pp=4, dp=4), {"tensor": 3}, "tensor",
     "collectives of tp 4 are exposed for 25% of the step (best: 10%); a rank sends 8.0 GB, 2.0 "
     "× the best's"),
    (Layout(tp=2, pp=8, dp=4), {"bubble": 5.5}, "bubble",
     "bubble 37%: pp - 1 = 7 over 16 micro-batches (best: 5.0%, pp - 1 = 1 over 16 "
     "micro-batches)"),
    (Layout(tp=2, pp=8, dp=4, microbatch=16, chunks=2), {"bubble": 5.5}, "bubble",
     "pp - 1 = 7 over 1 micro-batch in 2 chunks"),
    (Layout(tp=1, pp=1, dp=64), {"data": 2.75}, "data",
     "gradients of dp 64 are exposed for 22% of the step (best: 2.5%); a rank sends 8.0 GB, 4.0 "
     "× the best's"),
    (Layout(tp=1, pp=16, dp=4, chunks=2), {"pipeline": 1.25}, "pipeline",
     "messages between 32 model chunks on 16 stages are exposed for 11% of the step"),
    (Layout(tp=8, pp=2, dp=4, recompute="full"), {"compute": 10.6}, "compute",
     "computes every block's forward twice: 10.60 s of compute instead of 8.00"),
    (Layout(tp=8, pp=2, dp=4, zero=0), {"optimizer": 0.4}, "optimizer",
     "the optimizer takes 400 ms with zero 0 over dp 4 (best: 0 ms with zero 1 over dp 4)"),
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
        "smaller matmuls: they reach 40% of the peak with tp 8 and b 1 (best: 60% with tp 4 and "
        "b 4)"
    )


def test_recomputing_counts_as_computing_and_not_as_a_smaller_product() -> None:
    layout = Layout(tp=4, dp=4)
    best = step_of(layout, compute=9, mfu=0.6)
    again = step_of(replace(layout, recompute="full"), compute=12, mfu=0.45)
    assert reached(again) == pytest.approx(reached(best)) == pytest.approx(0.6)
    assert "twice" in why(best, again, SELENE)
    slow = step_of(replace(layout, recompute="full", microbatch=1), compute=24, mfu=0.225)
    assert "smaller matmuls" in why(best, slow, SELENE), "recomputing explains 6 of 15 s"


def test_equally_fast_layouts_differ_by_memory_and_nearly_equal_ones_say_so() -> None:
    twin = replace(BEST, layout=replace(BEST.layout, sequence=True), memory_bytes={"other": 3.5e9})
    assert why(BEST, twin, SELENE) == "as fast; each device uses 2.5 GB more"
    assert why(BEST, BEST, SELENE) == "the best"
    near = step_of(Layout(tp=8, pp=1, dp=8), **AS_BEST | {"data": 0.28})
    assert why(BEST, near, SELENE).startswith("almost as fast: gradients of dp 8")


def test_a_tp_past_the_node_blames_the_wire_only_where_the_best_stays_inside() -> None:
    outside = step_of(Layout(tp=16, dp=4), **AS_BEST)
    further = step_of(Layout(tp=32, dp=2), **AS_BEST | {"tensor": 9})
    assert "leaves the node" in why(BEST, further, SELENE)
    assert "leaves the node" not in why(outside, further, SELENE)


def test_a_model_that_does_not_fit_is_reported_with_the_excess_and_the_largest_holder() -> None:
    assert sum(seconds(BEST).values()) == BEST.step_s and tuple(seconds(BEST)) == PARTS
    held = {"parameters": 20e9, "activations": 61e9, "gradients": 15.3e9}
    assert why_not(held, 80e9) == "does not fit: 96.3 GB of 80.0 GB, activations 61.0 GB"
    barely = why_not(held, sum(held.values()) - 2e7)
    assert barely == "does not fit: 96.300 GB of 96.280 GB, activations 61.0 GB"
