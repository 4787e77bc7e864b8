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
    leaving_bytes,
    left_on_4_ranks,
    of_the_rule,
    why_not,
)
from .scenarios import (
    HANDING,
    MESHES,
    NORM_MESHES,
    PLACES,
    SHAPE,
    Axes,
    counted,
    handed,
    norm_on_mesh,
    right_place,
    squares,
    through_hand_on,
)


def _named(axes: Axes) -> str:
    return f"Mesh({', '.join(f'{axis}={n}' for axis, n in axes.items())})"


# ---- place(rank, axes, rows)

ORDER = ("rows", "after", "averaged", "tied")
PLACE_HINTS = {
    "rows": "Replicas have rows of their own. Who shares a layer, or hands micro-batches on, works "
    "on the same ones.",
    "after": "The rank with the next index on pp, and the same on all other axes; behind the last "
    "stage there is none.",
    "averaged": "Replicas of this rank: they have the same part of the model, so they differ on dp "
    "only.",
    "tied": "The first and the last stage have the embedding, and each rank of tp and dp its own "
    "part or copy: only the index on pp differs. One stage alone has nobody to add up with.",
}


@exercise(points=2)
def place(student: Student) -> Iterator[str]:
    """place(rank, axes, rows): its rows, the next rank, and its groups."""
    for axes, rows in PLACES:
        ranks = range(axes["pp"] * axes["dp"] * axes["tp"])
        cases = [(rank, dict(axes), rows) for rank in ranks]
        for rank, found in zip(ranks, alone_for_each(student, cases)):
            where = f"{_named(axes)}, rank {rank} at {coordinates(axes, rank)}, {rows} rows"
            expected = "four things: (begin, end), after, averaged, tied"
            several(found, 4, f"{where}: place returned", expected, no_return(found))
            right = right_place(rank, axes, rows)
            for name, its, good in zip(ORDER, map(_listed, found), map(_listed, right)):
                if its != good:
                    fail(
                        f"{where}: {name} is {brief(its)}.",
                        expected=brief(good),
                        hint=PLACE_HINTS[name],
                    )
    yield f"every rank of {len(PLACES)} meshes, in several orders of axes"
    yield "replicas have other rows, all others the same; the tied embedding has a group of its own"


def _listed(x: Any) -> Any:
    return [plain(one) for one in x] if isinstance(x, (tuple, list)) else plain(x)


# ---- sent_bytes(training, stage)

SENT_HINTS = {
    "tensor": "Four all-reduces of x for each layer; on the first stage one more after the "
    "embedding, on the last one before the head, and three numbers a token for the loss. All "
    "micro-batches together have the rows of this replica.",
    "pipeline": "To the stage after go activations, to the one before their gradients: the first "
    "and the last stage have one neighbour.",
    "data": "One all-reduce of what this rank has, over its replicas.",
    "embedding": "An all-reduce of two ranks, of this rank's rows of the table: on the first and "
    "the last stage, if these are two.",
}


@exercise(points=3)
def sent_bytes(student: Student) -> Iterator[str]:
    """sent_bytes(training, stage): what a rank sends in a step, by axis."""
    for training, right in counted():
        axes = training.axes
        found = alone_for_each(student, [(training, stage) for stage in range(axes["pp"])])
        for stage, (its, good) in enumerate(zip(found, right, strict=True)):
            where = f"{_named(axes)}, stage {stage}"
            if not isinstance(its, dict) or its.keys() != good.keys():
                fail(
                    f"{where}: sent_bytes returned {brief(its)}.",
                    expected="bytes by axis, as {" + ", ".join(f'"{a}": ...' for a in good) + "}",
                )
            for axis, count in good.items():
                if wrong := difference(its[axis], float(count), 1e-9):
                    number, times = plain(its[axis]), ""
                    if count and isinstance(number, (int, float)):
                        times = f": {number / count:.3g} × what was counted"
                    fail(f"{where}, {axis}: {wrong}{times}.", hint=SENT_HINTS[axis])
    yield f"the bytes that 4 ranks sent, of each stage and each axis, on {len(MESHES)} meshes"


# ---- global_norm(mesh, gradients)

FEW_BYTES = 100


@exercise(points=4)
def global_norm(student: Student) -> Iterator[str]:
    """global_norm(mesh, gradients): the norm of the model's gradient, the same on all ranks."""
    for axes in NORM_MESHES:
        ran = run(8, norm_on_mesh, axes, student).values
        cut, whole, tied = squares(axes)
        right = float((sum(cut) + sum(whole) + tied) ** 0.5)
        for rank, (found, _) in enumerate(ran):
            if wrong := difference(found, right, 1e-9):
                fail(
                    f"{_named(axes)}, rank {rank}: the norm is {wrong}.",
                    hint=no_return(found) or _norm_hint(axes, rank, plain(found)),
                )
        if (most := max(sent for _, sent in ran)) > FEW_BYTES:
            fail(
                f"{_named(axes)}: a rank sends {most:,.0f} bytes.",
                expected=f"at most {FEW_BYTES}: a few numbers",
                hint="Sums of squares add up; gradients may stay where they are.",
            )
    yield f"the norm of one process, on all ranks of {len(NORM_MESHES)} meshes"
    yield "replicas, replicated parameters and the tied embedding counted once"
    yield "a few numbers sent"


def _norm_hint(axes: Axes, rank: int, found: Any) -> str:
    cut, whole, tied = squares(axes)
    t, d, copies = axes["tp"], axes["dp"], 1 + (axes["pp"] > 1)
    stage = coordinates(axes, rank)["pp"]
    everything = sum(cut) + sum(whole) + tied
    roots = sum((c + w + tied * (k == 0)) ** 0.5 for k, (c, w) in enumerate(zip(cut, whole)))
    ends = tied if stage in (0, axes["pp"] - 1) else 0.0
    causes = {
        "What is whole on every rank of tp counts once, and not t times.": [
            sum(cut) + t * sum(whole) + tied,
            sum(cut) + t * sum(whole) + copies * tied,
        ],
        "The embedding is on the first and on the last stage, with the same gradient: one of "
        "them counts.": [everything + tied],
        "Replicas have the same gradients after averaging: over dp there is nothing to add.": [
            d * everything,
            d * (everything + tied),
        ],
        "Those are the squares of all ranks. Much is counted twice: over dp everything, over tp "
        "what is whole, over pp the embedding.": [
            d * (sum(cut) + t * sum(whole) + copies * tied),
        ],
        "That is the norm of this stage. And the others?": [
            cut[stage] + whole[stage] + ends,
            cut[stage] + whole[stage] + tied * (stage == 0),
        ],
        "Squares add up; their root is the last step.": [everything**2, roots**2],
        "The embedding is a part of the model: it counts once, and not never.": [everything - tied],
    }
    for words, wrong in causes.items():
        if any(not difference(found, value**0.5, 1e-6) for value in wrong):
            return words
    return (
        "Add up squares: over tp of what is cut, then over pp of all that counts here; a root "
        "at the very end."
    )


# ---- hand_on(mesh, x)


@exercise(points=3)
def hand_on(student: Student) -> Iterator[str]:
    """hand_on(mesh, x): x goes to the next stage once, not t times."""
    whole = 8 * SHAPE[0] * SHAPE[1] * SHAPE[2]
    for axes in HANDING:
        t = axes["tp"]
        for rank, (found, sent) in enumerate(run(8, through_hand_on, axes, student).values):
            where, at = f"{_named(axes)}, rank {rank}", coordinates(axes, rank)
            if at["pp"] and (wrong := difference(found, handed(at["dp"]), 1e-12)):
                hint = "Does stage 1 return x?" if not isinstance(found, Tensor) else ""
                fail(
                    f"{where} returned {wrong}.",
                    hint=hint
                    or "Each rank of stage 0 sends another part, to the rank with its "
                    "own index on tp; there all parts are gathered, in their order.",
                )
            right = {"pp": 0.0, "tp": (t - 1) / t * whole} if at["pp"] else {"pp": whole / t}
            for axis, count in {"tp": 0.0, "others": 0.0, **right}.items():
                if abs(sent[axis] - count) > 0.5:
                    over = "mesh.pp" if axis == "pp" else "mesh.tp" if axis == "tp" else "others"
                    fail(
                        f"{where} (stage {at['pp']}) sends {sent[axis]:,.0f} bytes over {over}.",
                        expected=f"{count:,.0f}, of the {whole} bytes of x",
                        hint="All ranks of tp have the same x: each sends 1/t of it, and inside "
                        "the node an all-gather makes it whole.",
                    )
    yield f"x whole and in order on the next stage, on {len(HANDING)} meshes"
    yield "1/t of it sent by each rank, (t-1)/t gathered over tp"


# ---- choose(job)

SMALLEST = "4 ranks in 2 nodes"


@exercise(points=4)
def choose(student: Student) -> Iterator[str | Score]:
    """choose(job): the axes, outermost first, that let the fewest bytes leave the nodes."""
    every = {**JOBS, SMALLEST: TINY}
    layout_of = {}
    for name, job in every.items():
        axes = alone(student, job)
        if not isinstance(axes, dict):
            fail(
                f"for {name}, choose returned {brief(axes)}.",
                expected='axes, outermost first, as {"pp": 4, "dp": 2, "tp": 8}',
            )
        if problem := why_not(job, axes):
            fail(f"for {name}, {brief(axes)} {problem}.", hint=f"The job: {brief(job, 200)}")
        layout_of[name] = axes
    tiny = layout_of.pop(SMALLEST)
    left = left_on_4_ranks(tiny)
    assert left == leaving_bytes(TINY, tiny), "a job's bytes are those of the ranks"
    part = of_the_rule(layout_of)
    if part >= 100 - 1e-9:
        fail(
            f"{part:.0f} per cent of the bytes of the rule of thumb leave the nodes.",
            expected="fewer: the rule is tensor parallelism over a node, over nodes the shortest "
            "pipeline that fits, and data parallelism with what is left",
            hint="A longer pipeline makes all-reduces smaller. Where does it lie in the nodes?",
        )
    yield "every layout fits, in memory and in its bubble"
    yield f"of {SMALLEST}, {left:,.0f} bytes left their nodes, as calculated"
    yield Score(round(part), BEST_PERCENT, "per cent of the rule of thumb's bytes")


assert all(not why_not(job, by_rule(job)) for job in JOBS.values())
