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
    expected_service,
    expected_steps,
    is_placement,
    push_and_pull,
    run_server,
    sizes_of_gpt,
    split_bytes,
    staleness_of,
    two_steps,
)


@exercise(points=3)
def server_step(student: Student) -> Iterator[str]:
    """server_step(comm, model, optimizer): gradients to rank 0, one step, weights to every rank."""
    for size in (2, 3, 4):
        ran = run(size, two_steps, student)
        expected = expected_steps(size)
        for step in range(STEPS):
            for rank, (weights, _) in enumerate(ran.values):
                before = ran.values[rank][0][step - 1] if step else expected[0]
                context = f"on {size} ranks, after step {step}"
                _check_weights(context, rank, before, weights[step], expected, step)
        for rank, (_, states) in enumerate(ran.values):
            if (states > 0) != (rank == 0):
                fail(
                    f"rank {rank} has optimizer state for {states} parameters.",
                    expected="optimizer state on rank 0 only",
                    hint="Which ranks call optimizer.step()?",
                )
        model_bytes = sum(w.nbytes for w in expected[0].values())
        expected_bytes = [
            STEPS * model_bytes * (size - 1 if rank == 0 else 1) for rank in range(size)
        ]
        for rank, (sent, correct) in enumerate(zip(ran.wire_bytes, expected_bytes)):
            if sent != correct:
                fail(
                    f"on {size} ranks, rank {rank} sends {sent:,} bytes in {STEPS} steps.",
                    expected=f"{correct:,}: "
                    + ("P to each worker per step" if rank == 0 else "P per step"),
                    hint="Send each gradient once to the server, and each weight once to each "
                    "worker; workers forward nothing.",
                )
    yield "every rank has the weights of a single process, on 2, 3 and 4 ranks"
    yield "only the server has optimizer state"
    yield "per step, a worker sends P bytes and the server (n-1) P"


def _check_weights(
    context: str, rank: int, before: Weights, weights: Weights, expected: list[Weights], step: int
) -> None:
    for name, correct in expected[step + 1].items():
        actual = weights[name]
        if not difference(actual, correct, 1e-5):
            continue
        if not difference(actual, before[name], 1e-7):
            fail(
                f"{context}, {name} on rank {rank} has not changed.",
                expected="the server's new weights",
                hint="Does the worker write the received weights into the parameter?",
            )
        update, correct_update = actual - expected[step][name], correct - expected[step][name]
        ratio = float((update * correct_update).sum() / (correct_update * correct_update).sum())
        if not difference(update, ratio * correct_update, 1e-4):
            fail(
                f"{context}, the update of {name} on rank {rank} is {ratio:.3g} × the correct "
                "update.",
                expected="an update by the mean of the ranks' gradients",
                hint="How many gradients did you add, and by what did you divide?",
            )
        fail(
            f"{context}, {name} on rank {rank} is {difference(actual, correct, 1e-5)}.",
            expected="the weights of a single process",
            hint="Does the update contain the gradients of all ranks?",
        )


@exercise(points=2)
def staleness(student: Student) -> Iterator[str]:
    """staleness(order): the staleness of each update if the server takes pushes in this order."""
    cases = [
        [1, 1, 1],
        [1, 2, 3, 1, 2, 3],
        [1, 1, 2, 1, 3, 1, 2, 2, 3],
        [2, 3, 3, 3, 1],
    ]
    ran = run(4, staleness_of, cases)
    for order, expected in zip(cases, ran.values[0]):
        returned = alone(student, list(order))
        returned = list(returned) if isinstance(returned, (list, tuple)) else returned
        if problem := difference(returned, expected, 0):
            fail(
                f"with order={order}, your function returned {problem}.",
                expected=expected,
                found=brief(returned),
                hint="Which version had this worker pulled, and how many updates followed?",
            )
    yield f"the staleness of {sum(map(len, cases))} updates, as counted by labkit's server"


@exercise(points=3)
def serve(student: Student) -> Iterator[str]:
    """serve(comm, w, lr, pushes): applies pushes as they arrive and answers each worker at once."""
    for late in (2, 1):
        ran = run(3, run_server, student, late)
        answer = ran.values[0]
        taken = list(answer[0]) if isinstance(answer[0], (list, tuple)) else answer[0]
        early = 3 - late
        expected = [early] * PUSHES + [late] * PUSHES
        if taken != expected:
            fail(
                f"with worker {late} late, serve returned {brief(taken)}.",
                expected=f"{expected}: the workers in the order in which their pushes arrived",
            )
        final, pulled = expected_service(expected)
        for worker in (early, late):
            for k, (received, correct) in enumerate(zip(ran.values[worker], pulled[worker])):
                if problem := difference(received, correct, 1e-5):
                    fail(
                        f"with worker {late} late, worker {worker} receives wrong weights after "
                        f"push {k}: {problem}.",
                        expected=correct.tolist(),
                        found=received.tolist(),
                        hint="First apply this gradient, w -= lr * gradient; then send w.",
                    )
        if problem := difference(answer[1], final, 1e-5):
            fail(
                f"with worker {late} late, the final w on rank 0 is {problem}.",
                expected=final.tolist(),
                hint="Update w in place: w -= ..., not w = w - ...",
            )
    yield "a late worker does not delay the other, whichever worker is late"
    yield f"{2 * PUSHES} gradients applied one by one, each answered with the new weights"


@exercise(points=3)
def place(student: Student) -> Iterator[str | Score]:
    """place(nbytes, servers): the rank that serves each parameter."""
    nbytes = sizes_of_gpt()
    ran = run(SERVERS, push_and_pull, student, nbytes)
    for rank, servers in enumerate(ran.values):
        if not is_placement(servers, len(nbytes), SERVERS):
            fail(
                f"rank {rank} returned {brief(servers)}, which does not name a server for each "
                "parameter.",
                expected=f"a list of {len(nbytes)} integers from 0 to {SERVERS - 1}",
            )
    busiest = busiest_link_bytes(ran.values[0], nbytes)
    _assert_sent_as_placed(ran.wire_bytes, ran.values[0], nbytes)
    one_server = busiest_link_bytes([0] * len(nbytes), nbytes)
    if busiest >= one_server:
        fail(
            f"the busiest link carries {busiest:,} bytes, no less than with one server.",
            expected=f"fewer than {one_server:,}",
            hint="Let every rank serve some of the parameters.",
        )
    yield f"{len(nbytes)} parameters served by {SERVERS} ranks, which sent all pushes and pulls"
    yield f"(if parameters could be split anywhere, {split_bytes(nbytes):,} bytes would be enough)"
    yield Score(busiest, BEST_BYTES, "bytes over the busiest link")


def _assert_sent_as_placed(sent: list[int], servers: list[int], nbytes: list[int]) -> None:
    for rank, sent_bytes in enumerate(sent):
        own = sum(size for server, size in zip(servers, nbytes) if server == rank)
        assert sent_bytes == (SERVERS - 1) * own + sum(nbytes) - own, (
            "the score counts the bytes that were sent"
        )
