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
    replayed_step_s,
    right_bytes,
    right_mfu_and_days,
    why_invalid,
)

GB = 1e9


def _as_number(found: Any, what: str, case: Case) -> float:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        fail(f"{case}: {what} {brief(found)}.", expected="a number", hint=no_return(found))
    return float(found)


def _close(found: float, right: float) -> bool:
    return isclose(found, right, rel_tol=1e-6)


# ---- held_bytes(sizes, layout, global_batch, layer_bytes)


@exercise(points=3)
def held_bytes(student: Student) -> Iterator[str]:
    """held_bytes(sizes, layout, global_batch, layer_bytes): stage 0's bytes by category."""
    arguments = [(*case, layer_bytes(case.sizes, case.layout)) for case in CASES]
    for case, found in zip(CASES, alone_for_each(student, arguments)):
        right = right_bytes(case)
        if not isinstance(found, dict) or found.keys() != right.keys():
            fail(
                f"{case}: held_bytes returned {brief(found)}.",
                expected=f"a dict of bytes: {', '.join(right)}",
                hint=no_return(found),
            )
        for name, bytes_ in right.items():
            number = _as_number(found[name], f"the bytes of {name} are", case)
            if not _close(number, bytes_):
                fail(
                    f"{case}: you return {number / GB:.3f} GB of {name}.",
                    expected=f"{bytes_ / GB:.3f} GB on each rank of the first stage",
                    hint=_memory_hint(name, number / bytes_, case),
                )
    yield "parameters, gradients and optimizer state, sharded over tp, pp and by ZeRO-1"
    yield "activations of the micro-batches in flight, even with few micro-batches, and with chunks"


def _memory_hint(name: str, ratio: float, case: Case) -> str:
    layout = case.layout
    if name == "activations":
        blocks, count = case.sizes.depth // layout.pp, in_flight(layout, case.global_batch)
        if _close(ratio, case.microbatches / count):
            return "GPipe holds all m micro-batches. How many does 1F1B hold?"
        if _close(ratio, 1 / count):
            return (
                "This is one micro-batch. How many are in flight on the first stage? (layer_bytes "
                "are those of one GPU: do not divide them by tp.)"
            )
        if _close(ratio, 1 / blocks):
            return "This is one layer. How many layers does a stage have?"
        if _close(ratio, layout.pp / count):
            return "How many micro-batches are there, and how many more are held with chunks?"
        return "The layers of a stage, times the micro-batches in flight, times layer_bytes."
    if _close(ratio, layout.tp):
        return "Tensor parallelism shards each matrix over tp ranks."
    all_layers = case._replace(layout=replace(layout, pp=1, chunks=1))
    if _close(ratio, right_bytes(all_layers)[name] / right_bytes(case)[name]):
        return "A stage has only 1/pp of the layers."
    if name == "optimizer state":
        if layout.zero and _close(ratio, layout.dp):
            return "ZeRO-1 shards the optimizer state over the replicas."
        if not layout.zero and _close(ratio, 1 / layout.dp):
            return "Without ZeRO, each replica holds the whole optimizer state."
        return "Adam's two moments and the master copy take 12 bytes per parameter."
    if _close(ratio, 1 / layout.dp):
        return "Each replica has all parameters and gradients of its stage: ZeRO-1 shards neither."
    return "12 w² parameters per layer and w v in the embedding, 2 bytes each, divided by tp."


# ---- step_s(layout, global_batch, forward_s, tensor_s)


@exercise(points=3)
def step_s(student: Student) -> Iterator[str]:
    """step_s(layout, global_batch, forward_s, tensor_s): seconds of a step, without DDP."""
    arguments = [(case.layout, case.global_batch, FORWARD_S, TENSOR_S) for case in CASES]
    for case, args, found in zip(CASES, arguments, alone_for_each(student, arguments)):
        step, right = _as_number(found, "a step takes", case), replayed_step_s(*args)
        if not _close(step, right):
            fail(
                f"{case}: a step takes {step:.3f} s.",
                expected=f"{right:.3f} s, as in a replay of its schedule",
                hint=_time_hint(step, case),
            )
    yield "the same seconds as a replay: 1F1B and interleaved, with and without recompute"


def _time_hint(step: float, case: Case) -> str:
    layout, m = case.layout, case.microbatches
    again = layout.recompute == "full"
    forward = FORWARD_S + TENSOR_S
    microbatch_s = {
        "": forward + 2 * FORWARD_S + TENSOR_S + again * forward,
        "Recompute adds a forward to the backward of each micro-batch.": forward
        + 2 * FORWARD_S + TENSOR_S,
        "A recomputed forward waits for its collectives again.": forward
        + 2 * FORWARD_S + TENSOR_S + again * FORWARD_S,
        "A backward waits for as many collectives as a forward, not twice as many.": 3 * forward
        + again * forward,
        "Add the time in which a stage waits for collectives.": (3 + again) * FORWARD_S,
        "A backward waits for tensor parallelism, too.": 3 * FORWARD_S + TENSOR_S
        + again * forward,
        'layout.recompute is "none" or "full", both truthy: compare it with "full".':
        2 * forward + 2 * FORWARD_S + TENSOR_S,
    }  # fmt: skip
    microbatch_counts = {
        "": m + (layout.pp - 1) / layout.chunks,
        "Add the bubble.": m,
        "Chunks make the bubble shorter (lab 16).": m + layout.pp - 1,
        "A replica has only its own rows: m = global batch / (dp b).": case.global_batch
        / layout.microbatch + (layout.pp - 1) / layout.chunks,
        "The last stage starts p - 1 forwards after the first, not p.": m + layout.pp,
        "Each micro-batch passes through a stage v times, in 1/v of the time each.":
        (m + layout.pp - 1) / layout.chunks,
    }  # fmt: skip
    for count_hint, count in microbatch_counts.items():
        for time_hint, time_s in microbatch_s.items():
            if (count_hint or time_hint) and _close(step, count * time_s):
                return count_hint or time_hint
    return "(m + (p-1)/v) times the time of a micro-batch: forward, backward and their waits."


# ---- mfu_and_days(sizes, layout, global_batch, step_s, peak_flops_per_s, tokens)

STEP_S, PEAK_FLOPS, TOKENS = 30.0, 312e12, 300e9


@exercise(points=3)
def mfu_and_days(student: Student) -> Iterator[str]:
    """mfu_and_days(sizes, layout, global_batch, step_s, peak_flops_per_s, tokens): (MFU, days)."""
    arguments = [(*case, STEP_S, PEAK_FLOPS, TOKENS) for case in CASES]
    for case, found in zip(CASES, alone_for_each(student, arguments)):
        sentence = f"{case}: mfu_and_days returned"
        several(found, 2, sentence, "two numbers: (mfu, days)", no_return(found))
        right_mfu, right_days = right_mfu_and_days(case, STEP_S, PEAK_FLOPS, TOKENS)
        mfu, days = (_as_number(x, f"{name} is", case) for x, name in zip(found, ("MFU", "days")))
        if not _close(mfu, right_mfu):
            fail(
                f"{case}: with steps of {STEP_S} s, the MFU is {mfu:.2%}.",
                expected=f"{right_mfu:.2%} of the peak of all {case.layout.ranks} GPUs",
                hint=_mfu_hint(mfu / right_mfu, case),
            )
        if not isclose(days, right_days, rel_tol=1e-4):  # accept a rounded number of steps
            tokens = case.global_batch * case.sizes.context
            fail(
                f"{case}: with steps of {STEP_S} s, training takes {days:,.1f} days.",
                expected=f"{right_days:,.1f} days for {TOKENS / 1e9:.0f} billion tokens",
                hint=f"A step trains on {tokens:,} tokens, the rows of all replicas; a day has "
                "86,400 seconds.",
            )
    yield "the MFU: the model's FLOPs, without recompute, over the peak of all GPUs"
    yield "days of training"


def _mfu_hint(ratio: float, case: Case) -> str:
    sizes, layout, rows = case
    flops, recomputed_flops = (
        step_flops(sizes.vocab, sizes.width, sizes.depth, sizes.heads, rows, sizes.context, **more)
        for more in ({}, {"recompute": True})
    )
    if isclose(ratio, 100):
        return "Return a fraction of the peak, 0 to 1, not a percentage."
    if isclose(ratio, recomputed_flops / flops, rel_tol=0.03):
        return "MFU leaves out recomputed FLOPs: with them it is hardware utilization (HFU)."
    for axis in ("tp", "pp", "dp"):
        if _close(ratio, getattr(layout, axis)):
            return f"Include the GPUs of the {axis} axis: n = tp pp dp."
    if _close(ratio, layout.ranks):
        return "This is the peak of one GPU."
    if _close(ratio, 1 / layout.dp):
        return "The global batch already includes all replicas."
    if _close(ratio, 1 / 3):
        return "Backward takes twice the FLOPs of forward."
    if 0.8 < ratio < 1.0:
        return "Almost: include attention's two matmuls, with kᵀ and with v, and the head's."
    return "A step: 72 b s L w² (1 + s/6w + v/12wL), with all rows b (lab 06: 3 x the forward)."


# ---- can_run(sizes, layout, gpus, global_batch, layer_bytes, budget_bytes)


@exercise(points=3)
def can_run(student: Student) -> Iterator[str]:
    """can_run(sizes, layout, gpus, global_batch, layer_bytes, budget_bytes): True or False."""
    cases = candidates()
    results = alone_for_each(student, [candidate.arguments for candidate in cases])
    for candidate, found in zip(cases, results):
        why = why_invalid(candidate)
        if not isinstance(found, bool):
            fail(
                f"{candidate}: can_run returned {brief(found)}.",
                expected="True or False",
                hint=no_return(found),
            )
        if found == bool(why):
            fail(
                f"{candidate}: can_run returned {found}.",
                expected=f"{not found}: {why}"
                if why
                else "True: all sizes divide evenly, and the layout fits in memory",
                hint="" if why else "Too strict: any number of ranks that divides all sizes works.",
            )
    valid = sum(not why_invalid(candidate) for candidate in cases)
    yield f"{valid} of {len(cases)} layouts, of 96, 64 and 1,024 ranks, can run"


# ---- choose(job)


@exercise(points=4)
def choose(student: Student) -> Iterator[str | Score]:
    """choose(job): a layout for a model on a cluster, scored by step time relative to the best."""
    found = alone_for_each(student, [(job,) for job in JOBS.values()])
    ratios = []
    for (name, job), layout in zip(JOBS.items(), found):
        _check_layout(name, job, layout)
        report = job.report(layout)
        capacity = job.cluster.device.memory_bytes
        if report.peak_bytes > capacity:
            held = {category: n for category, n in report.memory_bytes.items() if n}
            fail(
                f"for {name}, {described(layout)} needs {report.peak_bytes / GB:.1f} GB.",
                expected=f"at most the {capacity / GB:.0f} GB of a GPU",
                found=", ".join(f"{category} {n / GB:.1f}" for category, n in held.items()),
                hint="Which choice reduces the largest category, and what does it cost?",
            )
        ratios.append(report.step_s / BEST_S[name])
        if ratios[-1] > MAX_RATIO:
            fail(
                f"for {name}, a step with {described(layout)} takes {report.step_s:.1f} s, "
                f"{ratios[-1]:.2f} times the best known.",
                expected=f"at most {MAX_RATIO:g} times the best known",
                hint=_choice_hint(report),
            )
        yield f"{name}: {described(layout)}, a step of {report.step_s:.1f} s"
    yield Score(round(1000 * sum(ratios) / len(ratios)), 1000, "per mille of the best steps known")


MAX_RATIO = 1.2  # of the step time to the best known step time


def _check_layout(name: str, job: Job, layout: Any) -> None:
    if not isinstance(layout, Layout):
        fail(
            f"for {name}, choose returned {brief(layout)}.",
            expected="a Layout",
            hint=no_return(layout),
        )
    case = Case(job.sizes, layout, job.global_batch)
    if why := why_invalid(Candidate(case, job.cluster.size, float("inf"))):
        fail(f"for {name}, {described(layout)} is invalid: {why}.", expected=str(job))
    try:
        job.report(layout)
    except ValueError as error:
        fail(f"for {name}, {described(layout)} is invalid: {error}.", expected=str(job))


def _choice_hint(report: StepReport) -> str:
    """A hint about the largest loss of time."""
    if report.layout.recompute == "full":
        return "The layout computes every forward twice: do activations not fit without recompute?"
    lost = {part: part_s for part, part_s in seconds(report).items() if part != "compute"}
    part = max(lost, key=lambda name: lost[name])
    share = f"{lost[part] / report.step_s:.0%} of the step is lost on {part}"
    return (
        f"{share}: "
        + {
            "tensor": "is the network fast enough for this tp?",
            "bubble": "fewer stages, more micro-batches, or chunks make it shorter.",
            "data": "gradients are sent once per step: how many bytes, over which network?",
            "pipeline": "with fewer stages or chunks, stages send less often.",
            "optimizer": "ZeRO-1 shards it over the replicas.",
        }[part]
    )
