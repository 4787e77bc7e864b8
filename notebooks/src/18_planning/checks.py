"""Checks of lab 18, "Planning"."""

from collections.abc import Iterator
from dataclasses import replace
from math import isclose
from typing import Any

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, fail, no_return, several
from labkit.course.ranks import alone_for_each
from labkit.predict import step_flops
from labkit.replaying.planning.layout import Layout, described
from labkit.replaying.planning.report import StepReport, seconds

from .scenarios import (
    BEST_S,
    CASES,
    FORWARD_S,
    JOBS,
    TENSOR_S,
    Candidate,
    Case,
    Job,
    candidates,
    in_flight,
    layer_bytes,
    problem,
    replayed_step_s,
    right_bytes,
    right_mfu_and_days,
)

GB = 1e9


def _number(found: Any, what: str, of: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        fail(f"{of}: {what} {brief(found)}.", expected="a number", hint=no_return(found))
    return float(found)


def _same(found: float, right: float) -> bool:
    return isclose(found, right, rel_tol=1e-6)


# ---- held_bytes(sizes, layout, global_batch, layer_bytes)


@exercise(points=3)
def held_bytes(student: Student) -> Iterator[str]:
    """held_bytes(sizes, layout, global_batch, layer_bytes): of the first stage, by category."""
    given = [(*case, layer_bytes(case.sizes, case.layout)) for case in CASES]
    for case, found in zip(CASES, alone_for_each(student, given)):
        right = right_bytes(case)
        if not isinstance(found, dict) or found.keys() != right.keys():
            fail(
                f"{case}: it returned {brief(found)}.",
                expected=f"a dict of bytes: {', '.join(right)}",
                hint=no_return(found),
            )
        for name, bytes_ in right.items():
            its = _number(found[name], f"{name}:", case)
            if not _same(its, bytes_):
                fail(
                    f"{case}: {name}: {its / GB:.3f} GB.",
                    expected=f"{bytes_ / GB:.3f} GB on each rank of the first stage",
                    hint=_memory_hint(name, its / bytes_, case),
                )
    yield "parameters, gradients and optimizer state, cut over tp, pp and what ZeRO-1 cuts"
    yield "activations of the micro-batches in flight, also with few of them, and with chunks"


def _memory_hint(name: str, times: float, case: Case) -> str:
    layout = case.layout
    if name == "activations":
        blocks, count = case.sizes.depth // layout.pp, in_flight(layout, case.global_batch)
        if _same(times, case.microbatches / count):
            return "That is GPipe, which holds all m. How many does 1F1B hold?"
        if _same(times, 1 / count):
            return (
                "That is one micro-batch. How many are in flight on the first stage? (And "
                "layer_bytes are of one GPU already: nothing is left to cut over tp.)"
            )
        if _same(times, 1 / blocks):
            return "That is one layer. How many does a stage have?"
        if _same(times, layout.pp / count):
            return "How many micro-batches are there, and how many more do chunks hold (lab 16)?"
        return "The layers of a stage, times the micro-batches in flight, times layer_bytes."
    if _same(times, layout.tp):
        return "Each matrix is cut over tp."
    all_layers = case._replace(layout=replace(layout, pp=1, chunks=1))
    if _same(times, right_bytes(all_layers)[name] / right_bytes(case)[name]):
        return "A stage has a part of the layers alone."
    if name == "optimizer state":
        if layout.zero and _same(times, layout.dp):
            return "ZeRO-1 cuts this over the replicas."
        if not layout.zero and _same(times, 1 / layout.dp):
            return "Without ZeRO each replica holds all of it."
        return "Adam's two moments and the master copy: 12 bytes for each number."
    if _same(times, 1 / layout.dp):
        return (
            "Each replica has all parameters and gradients of its stage; ZeRO-1 does not cut them."
        )
    return "12 w² numbers a layer and w v of the embedding, 2 bytes each, over tp."


# ---- step_s(layout, global_batch, forward_s, tensor_s)


@exercise(points=3)
def step_s(student: Student) -> Iterator[str]:
    """step_s(layout, global_batch, forward_s, tensor_s): seconds of a step, without DDP's part."""
    given = [(case.layout, case.global_batch, FORWARD_S, TENSOR_S) for case in CASES]
    for case, args, found in zip(CASES, given, alone_for_each(student, given)):
        its, right = _number(found, "a step takes", case), replayed_step_s(*args)
        if not _same(its, right):
            fail(
                f"{case}: a step takes {its:.3f} s.",
                expected=f"{right:.3f} s, as a replay of its schedule",
                hint=_time_hint(its, case),
            )
    yield "the seconds of a replayed schedule: 1F1B and interleaved, plain and with recompute"


def _time_hint(its: float, case: Case) -> str:
    layout, m = case.layout, case.microbatches
    again = layout.recompute == "full"
    forward = FORWARD_S + TENSOR_S
    both = {
        "": forward + 2 * FORWARD_S + TENSOR_S + again * forward,
        "Recomputing is a forward more, in the backward of each micro-batch.": forward
        + 2 * FORWARD_S + TENSOR_S,
        "A forward that is computed again waits for its collectives again.": forward
        + 2 * FORWARD_S + TENSOR_S + again * FORWARD_S,
        "A backward waits for as many collectives as a forward, not for twice as many.": 3 * forward
        + again * forward,
        "Where is the time for collectives? The stage stands still for them.": (3 + again)
        * FORWARD_S,
        "A backward waits for tensor parallelism as well.": 3 * FORWARD_S + TENSOR_S
        + again * forward,
        'layout.recompute is "none" or "full", and both are true: compare it with "full".':
        2 * forward + 2 * FORWARD_S + TENSOR_S,
    }  # fmt: skip
    wholes = {
        "": m + (layout.pp - 1) / layout.chunks,
        "Where is the bubble?": m,
        "Chunks make the bubble shorter (lab 16).": m + layout.pp - 1,
        "A replica has a part of the rows alone: m = global batch / (dp b).": case.global_batch
        / layout.microbatch + (layout.pp - 1) / layout.chunks,
        "The last stage begins p - 1 forwards after the first, not p.": m + layout.pp,
        "Chunks go round v times, and each takes 1/v of the time.": (m + layout.pp - 1)
        / layout.chunks,
    }  # fmt: skip
    for how_many, whole in wholes.items():
        for what, each in both.items():
            if (how_many or what) and _same(its, whole * each):
                return how_many or what
    return "(m + (p-1)/v) times what a micro-batch takes: forward, backward, and what they wait."


# ---- mfu_and_days(sizes, layout, global_batch, step_s, peak_flops_per_s, tokens)

STEP_S, PEAK_FLOPS, TOKENS = 30.0, 312e12, 300e9


@exercise(points=3)
def mfu_and_days(student: Student) -> Iterator[str]:
    """mfu_and_days(sizes, layout, global_batch, step_s, peak_flops_per_s, tokens): (MFU, days)."""
    given = [(*case, STEP_S, PEAK_FLOPS, TOKENS) for case in CASES]
    for case, found in zip(CASES, alone_for_each(student, given)):
        several(found, 2, f"{case}: it returned", "two numbers: (mfu, days)", no_return(found))
        right = right_mfu_and_days(case, STEP_S, PEAK_FLOPS, TOKENS)
        its = [_number(one, f"{name} is", case) for one, name in zip(found, ("the MFU", "days"))]
        if not _same(its[0], right[0]):
            fail(
                f"{case}, a step of {STEP_S} s: an MFU of {its[0]:.2%}.",
                expected=f"{right[0]:.2%} of the peak of all {case.layout.ranks} GPUs",
                hint=_mfu_hint(its[0] / right[0], case),
            )
        if not isclose(its[1], right[1], rel_tol=1e-4):  # whole steps are as good
            tokens = case.global_batch * case.sizes.context
            fail(
                f"{case}: {its[1]:,.1f} days.",
                expected=f"{right[1]:,.1f} days: {TOKENS / 1e9:.0f} billion tokens, "
                f"steps of {STEP_S} s",
                hint=f"A step trains on {tokens:,} tokens, the rows of all replicas; a day has "
                "86,400 seconds.",
            )
    yield "the MFU: each operation of the model once, over the peak of all GPUs"
    yield "days of training"


def _mfu_hint(times: float, case: Case) -> str:
    sizes, layout, rows = case
    flops = [
        step_flops(sizes.vocab, sizes.width, sizes.depth, sizes.heads, rows, sizes.context, **more)
        for more in ({}, {"recompute": True})
    ]
    if isclose(times, 100):
        return "A part of the peak, from 0 to 1; not in per cent."
    if isclose(times, flops[1] / flops[0], rel_tol=0.03):
        return "What is computed again is not the model's: that is hardware utilisation (HFU)."
    for axis in ("tp", "pp", "dp"):
        if _same(times, getattr(layout, axis)):
            return f"The GPUs of the {axis} axis are paid for, too: n = tp pp dp."
    if _same(times, layout.ranks):
        return "That is the peak of one GPU."
    if _same(times, 1 / layout.dp):
        return "The global batch is that of all replicas already."
    if _same(times, 1 / 3):
        return "Backward is twice the forward."
    if 0.8 < times < 1.0:
        return "Nearly: attention's q kᵀ and its product with v, and the head, are products, too."
    return "A step: 72 b s L w² (1 + s/6w + v/12wL), with b all rows (lab 06: 3 x the forward)."


# ---- can_run(sizes, layout, gpus, global_batch, layer_bytes, budget_bytes)


@exercise(points=3)
def can_run(student: Student) -> Iterator[str]:
    """can_run(sizes, layout, gpus, global_batch, layer_bytes, budget_bytes): True or False."""
    every = candidates()
    for one, found in zip(every, alone_for_each(student, [one.given for one in every])):
        why = problem(one)
        if not isinstance(found, bool):
            fail(
                f"{one}: it returned {brief(found)}.",
                expected="True or False",
                hint=no_return(found),
            )
        if found == bool(why):
            fail(
                f"{one}: it returned {found}.",
                expected=f"{not found}: {why}" if why else "True: all divides, and it fits",
                hint=""
                if why
                else "Ask for no more than must be: any number of ranks that divides.",
            )
    good = sum(not problem(one) for one in every)
    yield f"{good} of {len(every)} layouts, of 96, 64 and 1,024 ranks: all that divide and fit"


# ---- choose(job)


@exercise(points=4)
def choose(student: Student) -> Iterator[str | Score]:
    """choose(job): a layout for a model on a cluster, scored by its step over the best known."""
    found = alone_for_each(student, [(job,) for job in JOBS.values()])
    times = []
    for (name, job), layout in zip(JOBS.items(), found):
        _can_be(name, job, layout)
        report = job.report(layout)
        has = job.cluster.device.memory_bytes
        if report.peak_bytes > has:
            held = {x: n for x, n in report.memory_bytes.items() if n}
            fail(
                f"for {name}, {described(layout)} holds {report.peak_bytes / GB:.1f} GB.",
                expected=f"no more than the {has / GB:.0f} GB of a GPU",
                found=", ".join(f"{x} {n / GB:.1f}" for x, n in held.items()),
                hint="Which choice makes the largest of these smaller, and what does it cost?",
            )
        times.append(report.step_s / BEST_S[name])
        if times[-1] > MOST:
            fail(
                f"for {name}, a step in {described(layout)} takes {report.step_s:.1f} s, "
                f"{times[-1]:.2f} times as long as it need.",
                expected=f"at most {MOST:g} times the best known",
                hint=_choice_hint(report),
            )
        yield f"{name}: {described(layout)}, a step of {report.step_s:.1f} s"
    yield Score(round(1000 * sum(times) / len(times)), 1000, "per mille of the best steps known")


MOST = 1.2  # times as long as the best


def _can_be(name: str, job: Job, layout: Any) -> None:
    if not isinstance(layout, Layout):
        fail(
            f"for {name}, choose returned {brief(layout)}.",
            expected="a Layout",
            hint=no_return(layout),
        )
    case = Case(job.sizes, layout, job.global_batch)
    if why := problem(Candidate(case, job.cluster.size, float("inf"))):
        fail(f"for {name}, {described(layout)} cannot be: {why}.", expected=str(job))
    try:
        job.report(layout)
    except ValueError as error:
        fail(f"for {name}, {described(layout)} cannot be: {error}.", expected=str(job))


def _choice_hint(report: StepReport) -> str:
    """A hint about the largest loss of time."""
    if report.layout.recompute == "full":
        return "It computes every forward twice: is there no room for the activations?"
    lost = {part: its for part, its in seconds(report).items() if part != "compute"}
    part = max(lost, key=lambda one: lost[one])
    share = f"{lost[part] / report.step_s:.0%} of it is lost on {part}"
    return (
        f"{share}: "
        + {
            "tensor": "are there wires fast enough for so much tp?",
            "bubble": "fewer stages, more micro-batches, or chunks make it shorter.",
            "data": "gradients travel once a step: how many bytes has a stage, over which wire?",
            "pipeline": "fewer stages or chunks send less often.",
            "optimizer": "ZeRO-1 shares it among the replicas.",
        }[part]
    )
