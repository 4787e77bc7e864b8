"""Checks of lab 12, "Moving tensors"."""

from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail
from labkit.course.ranks import alone

from .offload import BEST_MS, Offloaded, models, stream_all
from .scenarios import BLOCKS, prefetch_log, run_bring_half, run_double_buffered

# ---- bring_half(bus, x, bus_rate, here_rate, there_rate)

RATES = (  # bytes/s: bus, cast on the source, cast on the target; when to cast
    (2e9, 20e9, 20e9, "before"),
    (60e9, 20e9, 3000e9, "after"),
    (6e9, 20e9, 2000e9, "before"),
    (7e9, 20e9, 2000e9, "after"),  # 2 more bytes on the bus cost less than a cast here
    (60e9, 20e9, 20e9, "before"),  # equally fast casts on both sides: casting after gains nothing
    (9e9, 20e9, 40e9, "before"),
)


@exercise(points=2)
def bring_half(student: Student) -> Iterator[str]:
    """bring_half(bus, x, bus_rate, here_rate, there_rate): x in fp16 on the other side, fast."""
    numel = 1000
    right = torch.linspace(-3, 3, numel).half()
    for *rates, best in RATES:
        value, moved_bytes = alone(run_bring_half, student, numel, tuple(rates))
        if value is None:
            fail("your function returned None.", expected="x in fp16, on the other side")
        if problem := difference(value, right, 1e-6):
            hint = "bus.copy(...) only starts the copy: has it ended before you use the data?"
            fail(
                f"your function returned {problem}.",
                expected="all elements of x, rounded to fp16 once",
                hint=hint if getattr(value, "dtype", None) == torch.float16 else "Return fp16.",
            )
        least, most = 2 * numel, 4 * numel
        if moved_bytes not in (least, most):
            fail(
                f"{moved_bytes:,} bytes crossed the bus for {numel:,} elements.",
                expected=f"{least:,} (cast before) or {most:,} (cast after)",
                hint="bus.copy(there, x) moves x once; `there` has the dtype of x.",
            )
        if moved_bytes != (least if best == "before" else most):
            bus, here, there = (rate / 1e9 for rate in rates)
            fail(
                f"with a bus of {bus:g} GB/s, and casts at {here:g} GB/s here and {there:g} there, "
                f"you cast {'after' if best == 'before' else 'before'} the copy.",
                expected=f"cast {best} the copy: it takes less time",
                hint="Add up each order's times: a cast reads 4 bytes and writes 2 per element.",
            )
    yield "all elements arrived, in fp16"
    yield f"the faster order for each of {len(RATES)} combinations of memories and bus"


# ---- prefetched(load, n, ahead)


@exercise(points=2, yields=True)
def prefetched(student: Student) -> Iterator[str]:
    """prefetched(load, n, ahead): yields each block's weights, with `ahead` loads in flight."""
    for n, ahead in ((5, 1), (6, 3), (3, 0), (2, 4), (1, 1), (0, 2)):
        _check_log(alone(prefetch_log, student, n, ahead), n, ahead)
    yield "all blocks in order, each waited for before it is used"
    yield "while a block is used, the next blocks are loading: ahead of them, or all that are left"
    yield "never more than ahead + 1 blocks at a time: a block is freed before the next load"


def _check_log(log: list[tuple[str, int]], n: int, ahead: int) -> None:
    case = f"with n={n} and ahead={ahead}"
    used = [k for what, k in log if what == "use"]
    if used != list(range(n)):
        fail(
            f"{case}, you yield blocks {brief(used)}.",
            expected=f"the weights of blocks {list(range(n))}, in this order, once each",
            hint="load(k).wait() returns the weights of block k: yield them.",
        )
    loads = [k for what, k in log if what == "load"]
    if sorted(loads) != list(range(n)):
        fail(f"{case}, you load blocks {brief(loads)}.", expected="each block once, no others")
    loaded = done = 0
    waited: set[int] = set()
    for what, k in log:
        loaded, done = loaded + (what == "load"), done + (what == "done")
        waited |= {k} if what == "wait" else set()
        if what == "load" and loaded - done > ahead + 1:
            fail(
                f"{case}, {loaded - done} blocks are loaded or loading at a time.",
                expected=f"at most {ahead + 1}, the number of buffers",
                hint="The caller frees a block when it asks for the next one: load then.",
            )
        if what == "use" and k not in waited:
            fail(
                f"{case}, block {k} is used before you wait for its load.",
                expected="wait, then yield",
            )
        if what == "use" and loaded < (wanted := min(n, k + 1 + ahead)):
            fail(
                f"{case}, {loaded} loads have started when block {k} is used.",
                expected=f"{wanted}: the next {ahead} blocks load while block {k} is used",
                hint="Which loads must have started before you yield block k?",
            )


# ---- double_buffered(bus, blocks, compute, x)


@exercise(points=3)
def double_buffered(student: Student) -> Iterator[str]:
    """double_buffered(bus, blocks, compute, x): two buffers; the bus loads while blocks compute."""
    ran = alone(run_double_buffered, student)
    if ran.order != list(range(len(BLOCKS))):
        fail(
            f"the blocks compute in the order {brief(ran.order)}.",
            expected=f"{list(range(len(BLOCKS)))}",
        )
    if ran.not_waited is not None:
        fail(
            f"block {ran.not_waited} computes before you wait for its load.",
            expected="bus.copy(...) for each block in order, and its wait() before compute",
            hint="bus.copy returns at once; call wait() on the arrival that it returns.",
        )
    if ran.wrong_weights is not None:
        fail(
            f"block {ran.wrong_weights} computes with wrong or overwritten weights.",
            expected="the weights of that block until it has computed",
            hint="Which buffer is free while block k computes? And how long is block k?",
        )
    if ran.late is not None:
        fail(
            f"block {ran.late} computes before the load of block {ran.late + 1} starts.",
            expected="start the next load before you call compute",
            hint="Start the load of block k + 1, then wait for block k, then compute.",
        )
    if isinstance(ran.value, bool) or not isinstance(ran.value, (int, float)):
        fail(f"you returned {brief(ran.value)}.", expected="the output x of the last block")
    if ran.value != ran.right:
        fail("the x you return is not the output of the last block.", expected=brief(ran.right))
    largest, total = 4 * max(BLOCKS), 4 * sum(BLOCKS)
    if ran.moved_bytes != total:
        fail(f"{ran.moved_bytes:,} bytes crossed the bus.", expected=f"{total:,}: each block once")
    if ran.buffers > 2 or ran.peak_bytes > 2 * largest + 256:
        fail(
            f"you hold {ran.peak_bytes:,} bytes in {ran.buffers} buffers.",
            expected=f"two buffers as large as the largest block, {2 * largest:,} bytes",
            hint="Allocate both before the loop, and load into buffer[: block.numel()].",
        )
    yield f"the right result, with {len(BLOCKS)} blocks of different sizes"
    yield "the next block loads while one computes, and overwrites no weights in use"
    yield "two buffers as large as the largest block, not a byte more"


# ---- plan(model)


@exercise(points=3)
def plan(student: Student) -> Iterator[str | Score]:
    """plan(model): the blocks that stay on the device, and the number to load ahead."""
    total = streamed = 0.0
    for model in models():
        keep, ahead = _plan_of(alone(student, model), model)
        total += model.pass_us(keep, ahead)
        streamed += model.pass_us(*stream_all(model))
    if total >= streamed:
        fail(
            f"one pass of each model takes {total / 1e3:,.0f} ms in total.",
            expected=f"less than the {streamed / 1e3:,.0f} ms of streaming all blocks",
            hint="A block that stays on the device need not cross the bus in every pass.",
        )
    yield "both models fit in the memory of their device"
    yield Score(round(total / 1e3), BEST_MS, "ms for one pass of each model")


def _plan_of(found: Any, model: Offloaded) -> tuple[set[int], int]:
    wanted = "(keep, ahead): a set of block indices, and a whole number, 1 or more"
    if not isinstance(found, tuple) or len(found) != 2:
        fail(f"plan returned {brief(found)}.", expected=wanted)
    keep, ahead = found
    if not isinstance(keep, (set, frozenset, list, tuple)):
        fail(f"keep is {brief(keep)}.", expected=wanted)
    blocks = range(len(model.nbytes))
    if unknown := [k for k in keep if type(k) is not int or k not in blocks]:  # 3.0 in range(5)
        fail(f"keep contains {brief(unknown[0])}.", expected=f"blocks 0 to {len(model.nbytes) - 1}")
    if isinstance(ahead, bool) or not isinstance(ahead, Integral) or ahead < 1:
        fail(f"ahead is {brief(ahead)}.", expected="a whole number, 1 or more")
    keep, ahead = set(keep), int(ahead)
    if (held_bytes := model.held_bytes(keep, ahead)) > model.cap_bytes:
        fail(
            f"{model.name}: your plan needs {held_bytes / 1e9:.2f} GB.",
            expected=f"at most {model.cap_bytes / 1e9:.2f} GB, buffers included",
            hint="model.held_bytes(keep, ahead) returns the memory that a plan needs.",
        )
    return keep, ahead
