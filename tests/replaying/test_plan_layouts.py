"""Which layouts there are: all that factor and no others, and what is said where none does."""

from dataclasses import replace
from functools import partial
from itertools import product

from labkit.replaying.planning.layout import Layout, Sizes, layouts
from labkit.replaying.planning.ranking import least_bytes
from plan_cases import SMALL
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
    ({"tp": 5}, "tp=5: 96 heads do not divide by 5; 1, 2, 3, 4, 6, 8, 12, 16, 24"),
    ({"pp": (2, 7)}, "pp=7: 96 blocks do not divide by 7; 1, 2, 3"),
    ({"dp": 5}, "dp=5: 1536 rows do not divide by 5"),
    ({"microbatch": 7}, "microbatch=7: 1536 rows"),
    ({"chunks": 9}, "chunks=9: 96 blocks"),
    ({"tp": 0}, "tp=0: give a whole number, 1 or more"),
    ({"tp": ()}, "tp has no numbers to choose from"),
    ({"zero": 3}, "zero=3: a plan knows 0 or 1"),
    ({"recompute": "selective"}, "recompute='selective': a plan knows none and full"),
    ({"tp": 3}, "no layout of 1024 ranks: .*with tp 3; 864 and 1152 ranks would do"),
    ({"ranks": 1000}, "no layout of 1000 ranks: .*; 864 and 1024 ranks would do"),
    ({"ranks": 7}, "no layout of 7 ranks: .*; 6 and 8 ranks would do"),
    ({"ranks": 0}, "ranks=0: give a whole number"),
    ({"global_batch": -1}, "global_batch=-1: give a whole number"),
    (
        {"sizes": ODD, "ranks": 8, "global_batch": 8, "tp": (2, 4), "sequence": True},
        "sequence=True: 7 positions divide over none of these tp",
    ),
    ({"sizes": replace(ODD, width=100, heads=3)}, "width=100 does not divide over heads=3"),
)


def test_the_ranks_that_would_do_do() -> None:
    for ranks in (864, 1024):
        assert layouts(GPT3, ranks, 1536)
    for ranks in range(865, 1024):
        raises("864 and 1024", layouts, GPT3, ranks, 1536)


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
