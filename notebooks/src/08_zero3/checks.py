"""Checks of lab 08, "ZeRO-3"."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, equal, fail, several
from labkit.course.ranks import Ran, alone, only, run
from labkit.parallel.common.flat import FlatPartition

from .prefetch import LIMIT_BYTES, WIRES, exposed_us, layers_of, most_held_bytes
from .scenarios import (
    LAYERS,
    SHAPES,
    UNITS,
    gathered,
    needed,
    parameters_of_the_unit,
    right_output,
    share_of,
    single_process,
    through_layers,
    unit_flat,
    watched,
    weights,
)

BEST_US = 169_739  # of choose_units, the best known


# ---- gather_unit(comm, share, shapes)


@exercise(points=2)
def gather_unit(student: Student) -> Iterator[str]:
    """gather_unit(comm, share, shapes): the whole parameters of a unit, from all ranks' shares."""
    for size in (2, 3, 4):
        ran = run(size, gathered, student)
        right, shapes = parameters_of_the_unit(), [tuple(shape) for shape in SHAPES]
        for rank, (found, _) in enumerate(ran.values):
            expected = f"a list of {len(right)} tensors, of the shapes {shapes}"
            several(found, len(right), f"rank {rank} returned", expected)
        equal(
            [list(found) for found, _ in ran.values],
            [right] * size,
            hint="The shares, one after the other, are the tensors, one after the other. Where is "
            "the padding?",
        )
        padded_bytes = 4 * FlatPartition(SHAPES, size).padded
        _all_gathers(ran, 1, "for all tensors of the unit together")
        _sent(ran.sent_bytes, (size - 1) * padded_bytes // size, "(n-1)/n of the padded bytes")
        for rank, (_, held) in enumerate(ran.values):
            if held > padded_bytes:
                fail(
                    f"rank {rank} holds {held:,} bytes at once.",
                    expected=f"{padded_bytes:,} bytes: the unit, once",
                    hint="A view of the buffer costs nothing; a copy holds the unit twice.",
                )
    yield "the parameters of all ranks' shares, on 2, 3 and 4 ranks, one of them with padding"
    yield "one all-gather, (n-1)/n of the bytes, and the unit once in memory"


# ---- GatheredLinear: forward(ctx, x, share, comm, shape), backward(ctx, dy)


@exercise(points=3)
def GatheredLinear(student: Student) -> Iterator[str]:
    """GatheredLinear: a layer whose weight is whole only while it computes."""
    for size in (2, 3):
        ran, grads = run(size, through_layers, student), single_process(size)
        for rank, mine in enumerate(ran.values):
            where, right = f"on {size} ranks, rank {rank}", needed(rank, size)
            if difference(mine["value"], right["value"], 1e-5):
                fail(
                    f"{where} computes another loss, {mine['value']:.6g}.",
                    expected=f"{right['value']:.6g}",
                    hint="A layer is x @ weight.T; weight is [out, in].",
                )
            _gradients(where, rank, size, mine["gradients"], grads)
            if difference(mine["x"], right["x"], 1e-5):
                fail(
                    f"{where}: the gradient of x is not right.",
                    hint="dx = dy @ weight. It belongs to this rank's rows alone: nobody sums it.",
                )
            _not_kept(where, size, mine, right)
        _traffic(size, ran)
    yield "losses and gradients of a single process, on 2 and 3 ranks; each gradient is a share"
    yield "between forward and backward no weight is whole; at most as much memory as needed"
    yield "two all-gathers and one reduce-scatter a layer: 3 (n-1)/n P, no byte more"


def _gradients(where: str, rank: int, size: int, found: list[Any], right: list[Tensor]) -> None:
    for i, (mine, whole) in enumerate(zip(found, right)):
        good = share_of([whole], rank, size)
        if not isinstance(mine, Tensor) or mine.shape != good.shape:
            fail(
                f"{where}: the gradient of layer {i}'s share is {brief(mine)}.",
                expected=f"a tensor of shape {tuple(good.shape)}, as the share",
            )
        if not difference(mine, good, 1e-4):
            continue
        if not difference(mine, size * good, 1e-4):
            fail(
                f"{where}: the gradient of layer {i}'s share is {size} × the right one.",
                expected="the mean over the ranks",
                hint="reduce_scatter sums.",
            )
        fail(
            f"{where}: the gradient of layer {i}'s share is not that of all ranks' rows: "
            f"{difference(mine, good, 1e-4)}.",
            hint="dw = dy.T @ x lies flat, is padded with zeros, divided, and reduced to its "
            "owners.",
        )


def _not_kept(where: str, size: int, mine: dict[str, Any], right: dict[str, Any]) -> None:
    too_much = mine["held_bytes"] - right["held_bytes"]
    if too_much > 0:
        whole_bytes = 4 * sum(shape.numel() for shape in LAYERS)
        fail(
            f"{where} holds {too_much:,} bytes too much between forward and backward"
            + (": the weights of all layers, whole." if too_much >= whole_bytes else "."),
            expected="activations and shares",
            hint="Who keeps the gathered weight alive? What does save_for_backward save?",
        )
    too_much = mine["peak_bytes"] - right["peak_bytes"]
    two_more = 2 * 4 * max(FlatPartition([shape], size).padded for shape in LAYERS)
    if too_much > two_more:  # a copy to flatten it, another to divide it
        fail(
            f"{where} holds {too_much:,} bytes more at its peak than are needed.",
            expected="the weight and the gradient of one layer, whole",
        )


def _traffic(size: int, ran: Ran) -> None:
    expected = "all-gathers of weights and reduce-scatters of gradients"
    hint = "Who needs the sum? Only the owner of a share."
    only(ran, ["all_gather", "reduce_scatter"], expected, hint)
    padded = [4 * FlatPartition([w.shape], size).padded for w in weights()]
    right = 3 * (size - 1) * sum(padded) // size
    _sent(ran.sent_bytes, right, "3 (n-1)/n of the padded bytes: gather, gather, reduce")


# ---- forward_with_prefetch(comm, shares, layer, x, ahead)


@exercise(points=3)
def forward_with_prefetch(student: Student) -> Iterator[str]:
    """forward_with_prefetch(comm, shares, layer, x, ahead): gathers each unit that many early."""
    last = len(UNITS) - 1
    for size, ahead in ((2, 0), (2, 1), (3, 2)):
        ran = run(size, watched, student, ahead)
        for rank, (y, calls) in enumerate(ran.values):
            where = f"with ahead={ahead}, rank {rank}"
            order = [call["unit"] for call in calls]
            if order != list(range(len(UNITS))):
                fail(
                    f"{where} computes units {order}.",
                    expected=str(list(range(len(UNITS)))),
                    hint="layer(i, flat, x) once for each share, in their order.",
                )
            for call in calls:
                _one_call(where, call, size, ahead, last)
            if problem := difference(y, right_output(size), 1e-5):
                fail(f"{where} returned {problem}.", hint="What layer returns is the next x.")
        _all_gathers(ran, len(UNITS), "one for each unit")
    yield "every unit whole when it computes, on 2 and 3 ranks"
    yield "while unit i computes, the next `ahead` are on their way, and nobody waits for them"
    yield "what has computed is freed: never more than 1 + ahead units in memory"


def _one_call(where: str, call: dict[str, Any], size: int, ahead: int, last: int) -> None:
    i = call["unit"]
    elements = UNITS[i] * size
    if not isinstance(call["flat"], Tensor) or list(call["flat"].shape) != [elements]:
        fail(
            f"{where}: unit {i} gets {brief(call['flat'])}.",
            expected=f"a flat tensor of {elements} elements: the shares of all ranks",
        )
    if problem := difference(call["flat"], unit_flat(i, size), 1e-6):
        fail(
            f"{where}: unit {i} computes with numbers that are not there yet: {problem}.",
            hint="What has to happen between asking for a gather and using what it brings?",
        )
    wanted = min(i + ahead, last) + 1
    if call["asked"] < wanted:
        fail(
            f"{where}: when unit {i} computes, {call['asked']} of {wanted} gathers are asked for.",
            expected=f"its own, those before it, and the next {ahead}",
            hint="Ask first, then compute: while it computes, the others travel.",
        )
    if call["asked"] > wanted:
        fail(
            f"{where}: when unit {i} computes, {call['asked']} gathers are asked for.",
            expected=f"{wanted}: {call['asked'] - wanted} of them hold memory too early",
        )
    if ahead and call["waited"] > i + 1:
        fail(
            f"{where}: when unit {i} computes, the rank has waited for {call['waited']} gathers.",
            expected=f"{i + 1}; the others may still travel",
            hint="Which argument makes an operation return a handle? When is its wait due?",
        )
    if call["alive"]:
        fail(
            f"{where}: when unit {i} computes, unit{'s' * (len(call['alive']) > 1)} "
            f"{', '.join(map(str, call['alive']))} still "
            f"hold{'s' * (len(call['alive']) == 1)} memory.",
            expected="what has computed is freed",
            hint="Memory goes when nothing refers to it any more: no list, no dict, no variable.",
        )


# ---- choose_units(layers, wire, limit_bytes)


@exercise(points=3)
def choose_units(student: Student) -> Iterator[str | Score]:
    """choose_units(layers, wire, limit_bytes): how many layers each unit has, and the prefetch."""
    layers, total_us = layers_of(), 0.0
    for name, wire in WIRES.items():
        found = alone(student, list(layers), wire, LIMIT_BYTES)
        counts, prefetch = _as_plan(found, len(layers))
        held = most_held_bytes(counts, prefetch, layers)
        if held > LIMIT_BYTES:
            fail(
                f"over the {name} latency your plan holds {held / 1e6:,.0f} MB at once.",
                expected=f"at most {LIMIT_BYTES / 1e6:,.0f} MB",
                hint="Which is cheaper to give up: larger units, or looking further ahead?",
            )
        exposed = exposed_us(counts, prefetch, layers, wire)
        simple = exposed_us([1] * len(layers), 1, layers, wire)
        if exposed >= simple:
            fail(
                f"over the {name} latency a rank waits {exposed:,.0f} µs in a step, no less than "
                "with a unit for each layer and prefetch 1.",
                expected=f"less than {simple:,.0f} µs",
                hint="Few gathers pay the latency seldom; early ones are hidden. Try some.",
            )
        total_us += exposed
    yield f"within {LIMIT_BYTES / 1e6:,.0f} MB, over a short and a long latency"
    yield Score(round(total_us), BEST_US, "µs of waiting, replayed")


def _as_plan(found: Any, layers: int) -> tuple[list[int], int]:
    several(found, 2, "choose_units returned", "(counts, prefetch), as in ([1, 2, 2, 1], 1)")
    counts, prefetch = found
    whole = isinstance(counts, list) and all(isinstance(x, int) and x > 0 for x in counts)
    if not whole or sum(counts) != layers:
        fail(
            f"{brief(counts)} does not cut {layers} layers into units.",
            expected=f"a list of whole numbers above 0 whose sum is {layers}",
        )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        fail(f"prefetch is {brief(prefetch)}.", expected="a whole number, 0 or more")
    return counts, prefetch


# ---- what a student is told


def _all_gathers(ran: Ran, count: int, why: str) -> None:
    only(ran, ["all_gather"], "all_gather alone")
    for rank, ops in enumerate(ran.ops):
        if len(ops) != count:
            fail(f"rank {rank} calls {len(ops)} all_gathers.", expected=f"{count}: {why}")


def _sent(sent_bytes: list[int], right: int, why: str) -> None:
    for rank, its in enumerate(sent_bytes):
        if its != right:
            fail(
                f"rank {rank} sends {its:,} bytes, {its / right:.3g} × what is needed.",
                expected=f"{right:,} = {why}",
            )
