"""Checks of lab 12, "Moving tensors"."""

from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail
from labkit.course.ranks import alone

from .offload import BEST_MS, Offloaded, models, stream_all
from .scenarios import BLOCKS, brought, doubled, prefetch_log

# ---- bring_half(bus, x, bus_rate, here_rate, there_rate)

RATES = (  # bytes per second of the bus, of casts here and there; what is best
    (2e9, 20e9, 20e9, "before"),
    (60e9, 20e9, 3000e9, "after"),
    (6e9, 20e9, 2000e9, "before"),
    (7e9, 20e9, 2000e9, "after"),  # 2 / bus is less than 6 / here
    (60e9, 20e9, 20e9, "before"),  # equally fast casts on both sides: casting late gains nothing
    (9e9, 20e9, 40e9, "before"),
)


@exercise(points=2)
def bring_half(student: Student) -> Iterator[str]:
    """bring_half(bus, x, bus_rate, here_rate, there_rate): x in fp16 on the other side, soonest."""
    numel = 1000
    right = torch.linspace(-3, 3, numel).half()
    for *rates, best in RATES:
        value, moved_bytes = alone(brought, student, numel, tuple(rates))
        if value is None:
            fail("your function returned None.", expected="the numbers in fp16, on the other side")
        if problem := difference(value, right, 1e-6):
            hint = "Is it there already when you use it? bus.copy(...) only starts the copy."
            fail(
                f"your function returned {problem}.",
                expected="x, rounded to fp16 once, all of it arrived",
                hint=hint if getattr(value, "dtype", None) == torch.float16 else "fp16 is wanted.",
            )
        least, most = 2 * numel, 4 * numel
        if moved_bytes not in (least, most):
            fail(
                f"{moved_bytes:,} bytes went over the bus for {numel:,} numbers.",
                expected=f"{least:,} (cast before) or {most:,} (cast after)",
                hint="bus.copy(there, x) moves x once; `there` has its dtype.",
            )
        if moved_bytes != (least if best == "before" else most):
            bus, here, there = (rate / 1e9 for rate in rates)
            fail(
                f"with a bus of {bus:g} GB/s, and casts of {here:g} GB/s here and {there:g} there, "
                f"you cast {'after' if best == 'before' else 'before'} the copy.",
                expected=f"cast {best}: it is there sooner",
                hint="Add up both ways: a cast reads 4 bytes a number and writes 2.",
            )
    yield "the numbers in fp16, all of them arrived"
    yield f"the faster order for each of {len(RATES)} pairs of memories and their bus"


# ---- prefetched(load, n, ahead)


@exercise(points=2, yields=True)
def prefetched(student: Student) -> Iterator[str]:
    """prefetched(load, n, ahead): yields the weights of each block, with `ahead` more in flight."""
    for n, ahead in ((5, 1), (6, 3), (3, 0), (2, 4), (1, 1), (0, 2)):
        _judge_log(alone(prefetch_log, student, n, ahead), n, ahead)
    yield "all blocks in order, each waited for before it is used"
    yield "while one is used, so many more are under way as are asked for, as far as there are any"
    yield "never more than one beyond these at a time: a load begins where a block was given back"


def _judge_log(log: list[tuple[str, int]], n: int, ahead: int) -> None:
    case = f"with n={n} and ahead={ahead}"
    used = [k for what, k in log if what == "use"]
    if used != list(range(n)):
        fail(
            f"{case} you yield {brief(used)}.",
            expected=f"the weights of blocks {list(range(n))}, in this order, once each",
            hint="load(k).wait() returns the weights of block k: yield these.",
        )
    loads = [k for what, k in log if what == "load"]
    if sorted(loads) != list(range(n)):
        fail(f"{case} you load {brief(loads)}.", expected="each block once, and no other")
    loaded = done = 0
    waited: set[int] = set()
    for what, k in log:
        loaded, done = loaded + (what == "load"), done + (what == "done")
        waited |= {k} if what == "wait" else set()
        if what == "load" and loaded - done > ahead + 1:
            fail(
                f"{case}, {loaded - done} blocks are loaded or under way at a time.",
                expected=f"at most {ahead + 1}: so many buffers there are",
                hint="A block is given back when you are asked for the next one: load then.",
            )
        if what == "use" and k not in waited:
            fail(
                f"{case}, block {k} is used before it was waited for.", expected="wait, then yield"
            )
        if what == "use" and loaded < (wanted := min(n, k + 1 + ahead)):
            fail(
                f"{case}, {loaded} loads have begun when block {k} is used.",
                expected=f"{wanted}: those {ahead} after it are under way meanwhile",
                hint="What must have begun before you yield block k?",
            )


# ---- double_buffered(bus, blocks, compute, x)


@exercise(points=3)
def double_buffered(student: Student) -> Iterator[str]:
    """double_buffered(bus, blocks, compute, x): two buffers; the bus loads while blocks compute."""
    ran = alone(doubled, student)
    if ran.order != list(range(len(BLOCKS))):
        fail(
            f"the blocks compute in the order {brief(ran.order)}.",
            expected=f"{list(range(len(BLOCKS)))}",
        )
    if ran.not_waited is not None:
        fail(
            f"block {ran.not_waited} computes before its load was waited for.",
            expected="bus.copy(...) for each block in order, and its wait() before compute",
            hint="bus.copy returns at once; the arrival that it returns has wait().",
        )
    if ran.spoiled is not None:
        fail(
            f"block {ran.spoiled} computes with weights that are not its own, or change meanwhile.",
            expected="the weights of that block, as long as it computes",
            hint="Which buffer is free while block k computes? And how long is block k?",
        )
    if ran.late is not None:
        fail(
            f"block {ran.late} computes, and the load of block {ran.late + 1} is not under way.",
            expected="the next load is issued before compute is called",
            hint="Issue the load of block k + 1, then wait for block k, then compute.",
        )
    if isinstance(ran.value, bool) or not isinstance(ran.value, (int, float)):
        fail(f"you returned {brief(ran.value)}.", expected="the x of the last block")
    if ran.value != ran.right:
        fail("the x you return is not that of the last block.", expected=brief(ran.right))
    largest, every = 4 * max(BLOCKS), 4 * sum(BLOCKS)
    if ran.moved_bytes != every:
        fail(
            f"{ran.moved_bytes:,} bytes went over the bus.", expected=f"{every:,}: each block once"
        )
    if ran.buffers > 2 or ran.peak_bytes > 2 * largest + 256:
        fail(
            f"you hold {ran.peak_bytes:,} bytes, in {ran.buffers} buffers.",
            expected=f"two buffers of the largest block, {2 * largest:,} bytes",
            hint="Make both before the loop, and use a part: buffer[: block.numel()].",
        )
    yield f"the right result, with {len(BLOCKS)} blocks of different size"
    yield "the next block is loaded while one computes, and spoils nothing"
    yield "two buffers of the largest block, and no byte more"


# ---- plan(model)


@exercise(points=3)
def plan(student: Student) -> Iterator[str | Score]:
    """plan(model): which blocks stay on the device, and how many are loaded ahead."""
    total = plain = 0.0
    for model in models():
        keep, ahead = _plan_of(alone(student, model), model)
        total += model.pass_us(keep, ahead)
        plain += model.pass_us(*stream_all(model))
    if total >= plain:
        fail(
            f"a pass of both models takes {total / 1e3:,.0f} ms together.",
            expected=f"less than {plain / 1e3:,.0f} ms, where nothing is kept",
            hint="What is kept need not come over the bus, pass after pass.",
        )
    yield "both models fit into the memory of their device"
    yield Score(round(total / 1e3), BEST_MS, "ms for a pass of both models")


def _plan_of(found: Any, model: Offloaded) -> tuple[set[int], int]:
    wanted = "(keep, ahead): a set of numbers of blocks, and 1 or more"
    if not isinstance(found, tuple) or len(found) != 2:
        fail(f"plan returned {brief(found)}.", expected=wanted)
    keep, ahead = found
    if not isinstance(keep, (set, frozenset, list, tuple)):
        fail(f"keep is {brief(keep)}.", expected=wanted)
    blocks = range(len(model.nbytes))
    if unknown := [k for k in keep if type(k) is not int or k not in blocks]:  # 3.0 would be, too
        fail(f"keep has {brief(unknown[0])}.", expected=f"blocks 0 to {len(model.nbytes) - 1}")
    if isinstance(ahead, bool) or not isinstance(ahead, Integral) or ahead < 1:
        fail(f"ahead is {brief(ahead)}.", expected="a whole number, 1 or more")
    keep, ahead = set(keep), int(ahead)
    if (held_bytes := model.held_bytes(keep, ahead)) > model.cap_bytes:
        fail(
            f"{model.name}: your plan holds {held_bytes / 1e9:.2f} GB.",
            expected=f"at most {model.cap_bytes / 1e9:.2f} GB, buffers and all",
            hint="model.held_bytes(keep, ahead) says what a plan holds.",
        )
    return keep, ahead
