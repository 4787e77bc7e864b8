"""Checks of lab 08, "ZeRO-3"."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, equal, fail, several
from labkit.course.ranks import Ran, alone, only, run
from labkit.parallel.common.flat import FlatPartition

from .prefetch import LIMIT_BYTES, LINKS, exposed_us, layers_of, most_held_bytes
from .scenarios import (
    LAYERS,
    SHAPES,
    UNITS,
    expected_output,
    run_forward,
    run_gather,
    run_layers,
    share_of,
    single_process,
    unit_flat,
    unit_parameters,
    unsharded,
    weights,
)

BEST_US = 169_739  # best known score of choose_units


# ---- gather_unit(comm, share, shapes)


@exercise(points=2)
def gather_unit(student: Student) -> Iterator[str]:
    """gather_unit(comm, share, shapes): the unsharded parameters of a unit, from all shares."""
    for size in (2, 3, 4):
        ran = run(size, run_gather, student)
        expected_parameters, shapes = unit_parameters(), [tuple(shape) for shape in SHAPES]
        for rank, (returned, _) in enumerate(ran.values):
            expected = f"a list of {len(expected_parameters)} tensors, with shapes {shapes}"
            several(returned, len(expected_parameters), f"rank {rank} returned", expected)
        equal(
            [list(returned) for returned, _ in ran.values],
            [expected_parameters] * size,
            hint="The concatenated shares are the concatenated tensors and padding: where is the "
            "padding?",
        )
        padded_bytes = 4 * FlatPartition(SHAPES, size).padded
        _check_all_gathers(ran, 1, "all tensors of the unit at once")
        nbytes = (size - 1) * padded_bytes // size
        _check_sent(ran.sent_bytes, nbytes, "(n-1)/n of the padded bytes")
        for rank, (_, held) in enumerate(ran.values):
            if held > padded_bytes:
                fail(
                    f"rank {rank} holds {held:,} bytes at its peak.",
                    expected=f"{padded_bytes:,} bytes: one copy of the unit",
                    hint="A view of the buffer takes no memory; a copy holds the unit twice.",
                )
    yield "the unit's parameters, on 2, 3 and 4 ranks, with and without padding"
    yield "one all-gather, (n-1)/n of the bytes, and one copy of the unit in memory"


# ---- GatheredLinear: forward(ctx, x, share, comm, shape), backward(ctx, dy)


@exercise(points=3)
def GatheredLinear(student: Student) -> Iterator[str]:
    """GatheredLinear: a layer that gathers its weight only while it computes."""
    for size in (2, 3):
        ran, grads = run(size, run_layers, student), single_process(size)
        for rank, actual in enumerate(ran.values):
            context, reference = f"on {size} ranks, rank {rank}", unsharded(rank, size)
            if difference(actual["value"], reference["value"], 1e-5):
                fail(
                    f"{context} computes a wrong loss, {actual['value']:.6g}.",
                    expected=f"{reference['value']:.6g}",
                    hint="A layer is x @ weight.T; weight is [out, in].",
                )
            _check_gradients(context, rank, size, actual["gradients"], grads)
            if difference(actual["x"], reference["x"], 1e-5):
                fail(
                    f"{context}: the gradient of x is wrong.",
                    hint="dx = dy @ weight. It belongs to this rank's rows: do not reduce it.",
                )
            _check_memory(context, size, actual, reference)
        _check_traffic(size, ran)
    yield "the losses and gradients of a single process, on 2 and 3 ranks, each gradient sharded"
    yield "no whole weight in memory between forward and backward, and no excess peak memory"
    yield "two all-gathers and one reduce-scatter per layer: exactly 3 (n-1)/n P bytes"


def _check_gradients(
    context: str, rank: int, size: int, shares: list[Any], gradients: list[Tensor]
) -> None:
    for i, (actual, whole) in enumerate(zip(shares, gradients)):
        correct = share_of([whole], rank, size)
        if not isinstance(actual, Tensor) or actual.shape != correct.shape:
            fail(
                f"{context}: the gradient of layer {i}'s share is {brief(actual)}.",
                expected=f"a tensor of shape {tuple(correct.shape)}, like the share",
            )
        if not difference(actual, correct, 1e-4):
            continue
        if not difference(actual, size * correct, 1e-4):
            fail(
                f"{context}: the gradient of layer {i}'s share is {size} × the correct gradient.",
                expected="the mean over the ranks",
                hint="reduce_scatter computes a sum over the ranks.",
            )
        fail(
            f"{context}: the gradient of layer {i}'s share is {difference(actual, correct, 1e-4)}.",
            expected="the mean over all ranks' rows",
            hint="Flatten dw = dy.T @ x, pad it with zeros, divide, and reduce it to its owners.",
        )


def _check_memory(
    context: str, size: int, actual: dict[str, Any], reference: dict[str, Any]
) -> None:
    too_much = actual["held_bytes"] - reference["held_bytes"]
    if too_much > 0:
        whole_bytes = 4 * sum(shape.numel() for shape in LAYERS)
        fail(
            f"{context} holds {too_much:,} bytes too many between forward and backward"
            + (": the whole weights of all layers." if too_much >= whole_bytes else "."),
            expected="activations and shares only",
            hint="What keeps the gathered weight alive? What do you pass to save_for_backward?",
        )
    too_much = actual["peak_bytes"] - reference["peak_bytes"]
    two_more = 2 * 4 * max(FlatPartition([shape], size).padded for shape in LAYERS)
    if too_much > two_more:  # one copy to flatten dw, one to divide it
        fail(
            f"{context} holds {too_much:,} bytes more than necessary at its peak.",
            expected="at most one layer's whole weight and whole gradient",
        )


def _check_traffic(size: int, ran: Ran) -> None:
    expected = "all-gathers of weights and reduce-scatters of gradients"
    hint = "Which rank needs the sum? Only the owner of the share."
    only(ran, ["all_gather", "reduce_scatter"], expected, hint)
    padded = [4 * FlatPartition([w.shape], size).padded for w in weights()]
    nbytes = 3 * (size - 1) * sum(padded) // size
    _check_sent(ran.sent_bytes, nbytes, "3 (n-1)/n of the padded bytes: gather, gather, reduce")


# ---- forward_with_prefetch(comm, shares, layer, x, ahead)


@exercise(points=3)
def forward_with_prefetch(student: Student) -> Iterator[str]:
    """forward_with_prefetch(comm, shares, layer, x, ahead): prefetches `ahead` units."""
    last = len(UNITS) - 1
    for size, ahead in ((2, 0), (2, 1), (3, 2)):
        ran = run(size, run_forward, student, ahead)
        for rank, (y, calls) in enumerate(ran.values):
            context = f"with ahead={ahead}, rank {rank}"
            order = [call["unit"] for call in calls]
            if order != list(range(len(UNITS))):
                fail(
                    f"{context} computes units {order}.",
                    expected=str(list(range(len(UNITS)))),
                    hint="Call layer(i, flat, x) once for each unit, in order.",
                )
            for call in calls:
                _check_call(context, call, size, ahead, last)
            if problem := difference(y, expected_output(size), 1e-5):
                fail(
                    f"{context} returned {problem}.", hint="layer returns the x for the next call."
                )
        _check_all_gathers(ran, len(UNITS), "one for each unit")
    yield "every unit is whole when it computes, on 2 and 3 ranks"
    yield "while a unit computes, the right number of later units is being gathered"
    yield "each unit is freed after it computes: at most 1 + ahead units in memory"


def _check_call(context: str, call: dict[str, Any], size: int, ahead: int, last: int) -> None:
    i = call["unit"]
    elements = UNITS[i] * size
    if not isinstance(call["flat"], Tensor) or list(call["flat"].shape) != [elements]:
        fail(
            f"{context}: layer({i}, flat, x) is called with a `flat` of {brief(call['flat'])}.",
            expected=f"a flat tensor of {elements} elements: the shares of all ranks",
        )
    if problem := difference(call["flat"], unit_flat(i, size), 1e-6):
        fail(
            f"{context}: when unit {i} computes, `flat` is {problem}.",
            hint="What must happen between the start of a gather and the use of its result?",
        )
    expected_count = min(i + ahead, last) + 1
    if call["started"] < expected_count:
        fail(
            f"{context}: when unit {i} computes, {call['started']} of {expected_count} gathers "
            "have started.",
            expected=f"{expected_count}: its own gather, those before it, and the next {ahead}",
            hint="Start the gathers, then compute: they run while the unit computes.",
        )
    if call["started"] > expected_count:
        fail(
            f"{context}: when unit {i} computes, {call['started']} gathers have started.",
            expected=f"{expected_count}: the other units hold memory too early",
        )
    if ahead and call["waited"] > i + 1:
        fail(
            f"{context}: when unit {i} computes, the rank has waited for {call['waited']} gathers.",
            expected=f"{i + 1}; the others may still be in flight",
            hint="Which argument makes a collective return a handle? When must you wait for it?",
        )
    if call["alive"]:
        fail(
            f"{context}: when unit {i} computes, unit{'s' * (len(call['alive']) > 1)} "
            f"{', '.join(map(str, call['alive']))} still hold{'s' * (len(call['alive']) == 1)} "
            "memory.",
            expected="units that have computed are freed",
            hint="A tensor is freed when no list, no dict and no variable refers to it.",
        )


# ---- choose_units(layers, link, limit_bytes)


@exercise(points=3)
def choose_units(student: Student) -> Iterator[str | Score]:
    """choose_units(layers, link, limit_bytes): the number of layers per unit, and the prefetch."""
    layers, total_us = layers_of(), 0.0
    for name, link in LINKS.items():
        returned = alone(student, list(layers), link, LIMIT_BYTES)
        counts, prefetch = _validated_plan(returned, len(layers))
        held = most_held_bytes(counts, prefetch, layers)
        if held > LIMIT_BYTES:
            fail(
                f"with the {name} latency, your plan holds {held / 1e6:,.0f} MB at its peak.",
                expected=f"at most {LIMIT_BYTES / 1e6:,.0f} MB",
                hint="Which costs less time: smaller units, or less prefetching?",
            )
        exposed = exposed_us(counts, prefetch, layers, link)
        simple = exposed_us([1] * len(layers), 1, layers, link)
        if exposed >= simple:
            fail(
                f"with the {name} latency, a rank waits {exposed:,.0f} µs in a step, no less than "
                "with one unit per layer and prefetch 1.",
                expected=f"less than {simple:,.0f} µs",
                hint="Fewer gathers add less latency; earlier gathers are hidden better.",
            )
        total_us += exposed
    yield f"within {LIMIT_BYTES / 1e6:,.0f} MB, with a short and with a long latency"
    yield Score(round(total_us), BEST_US, "µs of waiting, replayed")


def _validated_plan(returned: Any, layers: int) -> tuple[list[int], int]:
    several(returned, 2, "choose_units returned", "(counts, prefetch), as in ([1, 2, 2, 1], 1)")
    counts, prefetch = returned
    valid = isinstance(counts, list) and all(isinstance(x, int) and x > 0 for x in counts)
    if not valid or sum(counts) != layers:
        fail(
            f"{brief(counts)} does not split {layers} layers into units.",
            expected=f"a list of positive integers whose sum is {layers}",
        )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        fail(f"prefetch is {brief(prefetch)}.", expected="an integer, 0 or more")
    return counts, prefetch


# ---- comparisons, with their messages


def _check_all_gathers(ran: Ran, count: int, reason: str) -> None:
    only(ran, ["all_gather"], "only all_gather")
    for rank, ops in enumerate(ran.ops):
        if len(ops) != count:
            fail(f"rank {rank} calls {len(ops)} all_gathers.", expected=f"{count}: {reason}")


def _check_sent(sent_bytes: list[int], expected: int, reason: str) -> None:
    for rank, nbytes in enumerate(sent_bytes):
        if nbytes != expected:
            fail(
                f"rank {rank} sends {nbytes:,} bytes, {nbytes / expected:.3g} × the necessary "
                "bytes.",
                expected=f"{expected:,} = {reason}",
            )
