"""Checks of lab 17, "Three dimensions"."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from labkit.comm.mesh import coordinates
from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail, no_return, plain, several
from labkit.course.ranks import alone, alone_for_each, run

from .placement import (
    BEST_PERCENT,
    JOBS,
    TINY,
    by_rule,
    counted_on_4_ranks,
    leaving_bytes,
    percent_of_rule,
    why_not,
)
from .scenarios import (
    HAND_ON_MESHES,
    MESHES,
    NORM_MESHES,
    PLACES,
    SHAPE,
    Axes,
    counted_bytes,
    replica_input,
    right_place,
    run_global_norm,
    run_hand_on,
    squared_norms,
)


def _mesh_name(axes: Axes) -> str:
    return f"Mesh({', '.join(f'{axis}={n}' for axis, n in axes.items())})"


# ---- place(rank, axes, rows)

ORDER = ("rows", "after", "averaged", "tied")
PLACE_HINTS = {
    "rows": "Each replica has different rows. The ranks of a tp group and the stages of a pipeline "
    "work on the same rows.",
    "after": "The rank with the next index on pp and the same index on all other axes; None for "
    "the last stage.",
    "averaged": "The replicas of this rank: they have the same shard of the model, so they differ "
    "only on dp.",
    "tied": "The first and last stages have the embedding, one shard per tp rank and one copy per "
    "replica: only the index on pp differs. A single stage has no embedding group.",
}


@exercise(points=2)
def place(student: Student) -> Iterator[str]:
    """place(rank, axes, rows): the rank's rows, the next stage's rank, and the rank's groups."""
    for axes, rows in PLACES:
        ranks = range(axes["pp"] * axes["dp"] * axes["tp"])
        cases = [(rank, dict(axes), rows) for rank in ranks]
        for rank, found in zip(ranks, alone_for_each(student, cases)):
            where = f"{_mesh_name(axes)}, rank {rank} at {coordinates(axes, rank)}, {rows} rows"
            expected = "four values: (begin, end), after, averaged, tied"
            several(found, 4, f"{where}: place returned", expected, no_return(found))
            right = right_place(rank, axes, rows)
            for name, value, answer in zip(ORDER, map(_as_lists, found), map(_as_lists, right)):
                if value != answer:
                    fail(
                        f"{where}: {name} is {brief(value)}.",
                        expected=brief(answer),
                        hint=PLACE_HINTS[name],
                    )
    yield f"every rank of {len(PLACES)} meshes, in several orders of axes"
    yield "rows differ only between replicas; each tied embedding has its own group"


def _as_lists(x: Any) -> Any:
    return [plain(element) for element in x] if isinstance(x, (tuple, list)) else plain(x)


# ---- sent_bytes(training, stage)

SENT_HINTS = {
    "tensor": "Four all-reduces of x per layer; one more after the embedding on the first stage; "
    "one before the head, and three elements per token for the loss, on the last stage. All "
    "micro-batches together have the rows of this replica.",
    "pipeline": "A stage sends activations to the next stage and their gradients to the previous "
    "stage; the first and last stages have one neighbor.",
    "data": "One all-reduce of this rank's gradients over its replicas.",
    "embedding": "With more than one stage, the first and last stages all-reduce the gradient of "
    "this rank's rows of the embedding table, over two ranks.",
}


@exercise(points=3)
def sent_bytes(student: Student) -> Iterator[str]:
    """sent_bytes(training, stage): the bytes that a rank sends in a step, by axis."""
    for training, right in counted_bytes():
        axes = training.axes
        found = alone_for_each(student, [(training, stage) for stage in range(axes["pp"])])
        for stage, (by_axis, counts) in enumerate(zip(found, right, strict=True)):
            where = f"{_mesh_name(axes)}, stage {stage}"
            if not isinstance(by_axis, dict) or by_axis.keys() != counts.keys():
                keys = ", ".join(f'"{axis}": ...' for axis in counts)
                fail(
                    f"{where}: sent_bytes returned {brief(by_axis)}.",
                    expected=f"a dict of bytes by axis: {{{keys}}}",
                )
            for axis, count in counts.items():
                if problem := difference(by_axis[axis], float(count), 1e-9):
                    number, ratio = plain(by_axis[axis]), ""
                    if count and isinstance(number, (int, float)):
                        ratio = f": {number / count:.3g} × the count"
                    fail(f"{where}, {axis}: {problem}{ratio}.", hint=SENT_HINTS[axis])
    yield f"the bytes that 4 ranks sent, for each stage and axis, on {len(MESHES)} meshes"


# ---- global_norm(mesh, gradients)

FEW_BYTES = 100  # for all sums together


@exercise(points=4)
def global_norm(student: Student) -> Iterator[str]:
    """global_norm(mesh, gradients): the norm of the model's gradient, the same on all ranks."""
    for axes in NORM_MESHES:
        ran = run(8, run_global_norm, axes, student).values
        cut, whole, tied = squared_norms(axes)
        right = float((sum(cut) + sum(whole) + tied) ** 0.5)
        for rank, (found, _) in enumerate(ran):
            if problem := difference(found, right, 1e-9):
                fail(
                    f"{_mesh_name(axes)}, rank {rank}: the norm is {problem}.",
                    hint=no_return(found) or _norm_hint(axes, rank, plain(found)),
                )
        if (most := max(sent for _, sent in ran)) > FEW_BYTES:
            fail(
                f"{_mesh_name(axes)}: a rank sends {most:,.0f} bytes.",
                expected=f"at most {FEW_BYTES}: a few elements",
                hint="Reduce sums of squares; do not send gradients.",
            )
    yield f"the norm of one process, on all ranks of {len(NORM_MESHES)} meshes"
    yield "replicas, replicated parameters and the tied embedding counted once"
    yield "each rank sends only a few elements"


def _norm_hint(axes: Axes, rank: int, found: Any) -> str:
    cut, whole, tied = squared_norms(axes)
    t, d, copies = axes["tp"], axes["dp"], 1 + (axes["pp"] > 1)
    stage = coordinates(axes, rank)["pp"]
    everything = sum(cut) + sum(whole) + tied
    roots = sum((c + w + tied * (k == 0)) ** 0.5 for k, (c, w) in enumerate(zip(cut, whole)))
    ends = tied if stage in (0, axes["pp"] - 1) else 0.0
    causes = {
        "A gradient that is replicated over tp counts once, not t times.": [
            sum(cut) + t * sum(whole) + tied,
            sum(cut) + t * sum(whole) + copies * tied,
        ],
        "The embedding is on the first and on the last stage, with the same gradient: count it "
        "on one of them.": [everything + tied],
        "Replicas have the same gradients after averaging: do not sum over dp.": [
            d * everything,
            d * (everything + tied),
        ],
        "This sums over all ranks, which counts some gradients more than once: all of them over "
        "dp, replicated ones over tp, the embedding over pp.": [
            d * (sum(cut) + t * sum(whole) + copies * tied),
        ],
        "This is the norm of one stage: add the squares of the other stages.": [
            cut[stage] + whole[stage] + ends,
            cut[stage] + whole[stage] + tied * (stage == 0),
        ],
        "Sum the squares; take the root in the last step.": [everything**2, roots**2],
        "The embedding is part of the model: count it once.": [everything - tied],
    }
    for cause, wrong_squares in causes.items():
        if any(not difference(found, value**0.5, 1e-6) for value in wrong_squares):
            return cause
    return (
        "Sum squares: those of sharded gradients over tp, then the stage's total over pp; take "
        "the root at the end."
    )


# ---- hand_on(mesh, x)


@exercise(points=3)
def hand_on(student: Student) -> Iterator[str]:
    """hand_on(mesh, x): sends x to the next stage once, not t times."""
    whole = 8 * SHAPE[0] * SHAPE[1] * SHAPE[2]
    for axes in HAND_ON_MESHES:
        t = axes["tp"]
        for rank, (found, sent) in enumerate(run(8, run_hand_on, axes, student).values):
            where, at = f"{_mesh_name(axes)}, rank {rank}", coordinates(axes, rank)
            if at["pp"] and (problem := difference(found, replica_input(at["dp"]), 1e-12)):
                hint = "Does stage 1 return x?" if not isinstance(found, Tensor) else ""
                fail(
                    f"{where} returned {problem}.",
                    hint=hint
                    or "Each rank of stage 0 sends a different chunk to the rank with the same "
                    "index on tp; there, an all-gather restores x with the chunks in order.",
                )
            right = {"pp": 0.0, "tp": (t - 1) / t * whole} if at["pp"] else {"pp": whole / t}
            for axis, count in {"tp": 0.0, "others": 0.0, **right}.items():
                if abs(sent[axis] - count) > 0.5:
                    group = "other groups" if axis == "others" else f"mesh.{axis}"
                    fail(
                        f"{where} (stage {at['pp']}) sends {sent[axis]:,.0f} bytes over {group}.",
                        expected=f"{count:,.0f} of the {whole} bytes of x",
                        hint="All ranks of a tp group have the same x: each sends 1/t of x, and an "
                        "all-gather over tp restores x on the next stage.",
                    )
    yield f"the next stage has all of x, in order, on {len(HAND_ON_MESHES)} meshes"
    yield "each rank sends 1/t of x; the all-gather over tp sends (t-1)/t"


# ---- choose(job)

SMALLEST = "4 ranks in 2 nodes"


@exercise(points=4)
def choose(student: Student) -> Iterator[str | Score]:
    """choose(job): the axes, outermost first, that send the fewest bytes between nodes."""
    layout_of = {}
    for name, job in {**JOBS, SMALLEST: TINY}.items():
        axes = alone(student, job)
        if not isinstance(axes, dict):
            fail(
                f"for {name}, choose returned {brief(axes)}.",
                expected='a dict of axes, outermost first, like {"pp": 4, "dp": 2, "tp": 8}',
            )
        if problem := why_not(job, axes):
            fail(f"for {name}, {brief(axes)} {problem}.", hint=f"The job: {brief(job, 200)}")
        layout_of[name] = axes
    tiny = layout_of.pop(SMALLEST)
    counted = counted_on_4_ranks(tiny)
    assert counted == leaving_bytes(TINY, tiny), "ranks send as many bytes as calculated"
    percent = percent_of_rule(layout_of)
    if percent >= 100 - 1e-9:
        fail(
            f"the bytes that leave nodes are {percent:.0f}% of those of the rule of thumb.",
            expected="less than 100%: the rule is tensor parallelism in a node, the shortest "
            "pipeline that fits over nodes, and data parallelism with the remaining ranks",
            hint="A longer pipeline makes all-reduces smaller. Where is pp in the order of axes?",
        )
    yield "every layout stays within the limits on memory and on the bubble"
    yield f"with {SMALLEST}, {counted:,.0f} bytes left their nodes, as calculated"
    yield Score(round(percent), BEST_PERCENT, "percent of the rule of thumb's bytes")


assert all(not why_not(job, by_rule(job)) for job in JOBS.values())
