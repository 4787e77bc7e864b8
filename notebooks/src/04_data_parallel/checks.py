"""Checks of lab 04, "Data parallel"."""

from collections.abc import Iterator

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, difference, fail
from labkit.course.ranks import alone, run

from .scenarios import (
    BEST_BYTES,
    PUSHES,
    SERVERS,
    STEPS,
    Weights,
    busiest_link_bytes,
    cut_bytes,
    is_placement,
    right_service,
    right_steps,
    served_by_many,
    sizes_of_gpt,
    staleness_of,
    two_steps,
    with_a_server,
)


@exercise(points=3)
def server_step(student: Student) -> Iterator[str]:
    """server_step(comm, model, optimizer): gradients to rank 0, one step, weights to every rank."""
    for size in (2, 3, 4):
        ran = run(size, two_steps, student)
        right = right_steps(size)
        for step in range(STEPS):
            for rank, (found, _) in enumerate(ran.values):
                before = ran.values[rank][0][step - 1] if step else right[0]
                _compare(f"on {size} ranks, after step {step}", rank, before, found[step], right,
                         step)  # fmt: skip
        for rank, (_, states) in enumerate(ran.values):
            if (states > 0) != (rank == 0):
                fail(
                    f"rank {rank} has an optimizer state for {states} parameters.",
                    expected="a state on rank 0 alone: the others need none",
                    hint="Who calls optimizer.step()?",
                )
        model_bytes = sum(w.nbytes for w in right[0].values())
        each = [STEPS * model_bytes * (size - 1 if rank == 0 else 1) for rank in range(size)]
        for rank, (sent, should) in enumerate(zip(ran.wire_bytes, each)):
            if sent != should:
                fail(
                    f"on {size} ranks, rank {rank} sends {sent:,} bytes in {STEPS} steps.",
                    expected=f"{should:,}: "
                    + ("P to each of the others, per step" if rank == 0 else "P per step"),
                    hint="Each gradient travels once to the server, and each weight once to each "
                    "worker; nobody passes anything on.",
                )
    yield "the weights of a single process on every rank, with 2, 3 and 4 ranks"
    yield "the optimizer's state on the server alone"
    yield "P sent by a worker, (n-1) P by the server"


def _compare(
    where: str, rank: int, before: Weights, found: Weights, right: list[Weights], step: int
) -> None:
    for name, good in right[step + 1].items():
        mine = found[name]
        if not difference(mine, good, 1e-5):
            continue
        if not difference(mine, before[name], 1e-7):
            fail(
                f"{where}, rank {rank} still has its old {name}.",
                expected="the server's new weights",
                hint="What does a worker receive? Is it written into the parameter?",
            )
        moved, should = mine - right[step][name], good - right[step][name]
        ratio = float((moved * should).sum() / (should * should).sum())
        if not difference(moved, ratio * should, 1e-4):
            fail(
                f"{where}, {name} of rank {rank} has moved {ratio:.3g} × as far as it should.",
                expected="a step with the mean of the ranks' gradients",
                hint="The sum of how many? Divided by how many?",
            )
        fail(
            f"{where}, {name} of rank {rank} is not that of a single process: "
            f"{difference(mine, good, 1e-5)}.",
            hint="Whose gradients are in the step? Are all of them?",
        )


@exercise(points=2)
def staleness(student: Student) -> Iterator[str]:
    """staleness(order): of each update, if the workers' pushes are taken in this order."""
    cases = [
        [1, 1, 1],
        [1, 2, 3, 1, 2, 3],
        [1, 1, 2, 1, 3, 1, 2, 2, 3],
        [2, 3, 3, 3, 1],
    ]
    ran = run(4, staleness_of, cases)
    for order, right in zip(cases, ran.values[0]):
        found = alone(student, list(order))
        found = list(found) if isinstance(found, (list, tuple)) else found
        if problem := difference(found, right, 0):
            fail(
                f"with order={order} your function returned {problem}.",
                expected=right,
                found=brief(found),
                hint="Which version had this worker pulled, and how many updates came since?",
            )
    yield f"the staleness of {sum(map(len, cases))} updates, as labkit's server counts them"


@exercise(points=3)
def serve(student: Student) -> Iterator[str]:
    """serve(comm, w, lr, pushes): takes pushes as they arrive, and answers each worker at once."""
    for late in (2, 1):
        ran = run(3, with_a_server, student, late)
        answer = ran.values[0]
        taken = list(answer[0]) if isinstance(answer[0], (list, tuple)) else answer[0]
        early = 3 - late
        right = [early] * PUSHES + [late] * PUSHES
        if taken != right:
            fail(
                f"with worker {late} late, serve returned {brief(taken)}.",
                expected=f"{right}: the workers in the order in which their pushes came",
            )
        weights, pulled = right_service(right)
        for worker in (early, late):
            for k, (mine, good) in enumerate(zip(ran.values[worker], pulled[worker])):
                if problem := difference(mine, good, 1e-5):
                    fail(
                        f"with worker {late} late, worker {worker} pulls wrong weights after its "
                        f"push {k}: {problem}.",
                        expected=good.tolist(),
                        found=mine.tolist(),
                        hint="First w -= lr * gradient, with this one gradient; then the answer.",
                    )
        if problem := difference(answer[1], weights, 1e-5):
            fail(
                f"with worker {late} late, w on rank 0 ends as {problem}.",
                expected=weights.tolist(),
                hint="Change w itself: w -= ..., and not w = w - ...",
            )
    yield "a late worker holds nobody up, whichever it is"
    yield f"{2 * PUSHES} gradients applied, each by itself, and each answered with the weights then"


@exercise(points=3)
def place(student: Student) -> Iterator[str | Score]:
    """place(nbytes, servers): which rank serves each parameter."""
    nbytes = sizes_of_gpt()
    ran = run(SERVERS, served_by_many, student, nbytes)
    for rank, servers in enumerate(ran.values):
        if not is_placement(servers, len(nbytes), SERVERS):
            fail(
                f"rank {rank} returned {brief(servers)}: that is not a server for each parameter.",
                expected=f"a list of {len(nbytes)} whole numbers from 0 to {SERVERS - 1}",
            )
    found = busiest_link_bytes(ran.values[0], nbytes)
    _sent_as_placed(ran.wire_bytes, ran.values[0], nbytes)
    one_server = busiest_link_bytes([0] * len(nbytes), nbytes)
    if found >= one_server:
        fail(
            f"the busiest link carries {found:,} bytes, no less than with one server.",
            expected=f"less than {one_server:,}",
            hint="Let every rank serve some of the parameters.",
        )
    yield f"{len(nbytes)} parameters served by {SERVERS} ranks, and sent so"
    yield f"(were they cut anywhere, {cut_bytes(nbytes):,} bytes would be enough)"
    yield Score(found, BEST_BYTES, "bytes over the busiest link")


def _sent_as_placed(sent: list[int], servers: list[int], nbytes: list[int]) -> None:
    for rank, its in enumerate(sent):
        own = sum(one for server, one in zip(servers, nbytes) if server == rank)
        assert its == (SERVERS - 1) * own + sum(nbytes) - own, "what is scored is what was sent"
