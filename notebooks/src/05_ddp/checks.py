"""Checks of lab 05, "DDP"."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor

from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import difference, fail
from labkit.course.ranks import Ran, only, run
from labkit.course.samples import gradient_bytes, is_a_cut, right_gradients, small_model
from labkit.parallel.common.flat import cut

from .buckets import BEST_US, FAST, SLOW, exposed_us, gradients_of
from .scenarios import Gradients, accumulated, after_backward, sent_in_buckets, two_steps


@exercise(points=2)
def average_gradients(student: Student) -> Iterator[str]:
    """average_gradients(comm, model): each .grad becomes the mean over the ranks."""
    for size in (2, 3, 4):
        ran = run(size, after_backward, student)
        _check_gradients(size, [gradients for gradients, _ in ran.values], right_gradients(size))
        for rank, (_, weights) in enumerate(ran.values):
            if any(
                difference(w, p.detach(), 0) for w, p in zip(weights, small_model().parameters())
            ):
                fail(
                    f"rank {rank}'s weights have changed.",
                    expected="unchanged weights: only the optimizer updates them",
                    hint="Average the gradients, not the weights.",
                )
        _only_all_reduces(ran, at_most=len(gradient_bytes()))
        _check_bytes(size, sum(ran.sent_bytes))
    yield "every gradient is the mean, on 2, 3 and 4 ranks"
    yield "each rank sends exactly 2(n-1)/n · P bytes"


@exercise(points=3)
def average_in_buckets(student: Student) -> Iterator[str]:
    """average_in_buckets(comm, model, bucket_bytes): gradients averaged bucket by bucket."""
    for size, bucket_bytes in [(2, 200), (3, 100), (4, 10**6)]:
        ran = run(size, after_backward, partial(student, bucket_bytes=bucket_bytes))
        _check_gradients(size, [gradients for gradients, _ in ran.values], right_gradients(size))
        _only_all_reduces(ran)
        buckets = cut(list(small_model().parameters()), bucket_bytes)
        expected_bytes = [sum(p.nbytes for p in bucket) for bucket in buckets]
        for rank, events in enumerate(ran.events):
            sent = [event.payload_bytes for event in events]
            if len(sent) != len(expected_bytes):
                fail(
                    f"with buckets of {bucket_bytes:,} bytes, rank {rank} should send "
                    f"{len(expected_bytes)} message{'s' * (len(expected_bytes) > 1)}, not "
                    f"{len(sent)}.",
                    expected=f"messages of {expected_bytes} bytes",
                    found=sent,
                    hint="Start a new bucket when the next gradient would exceed the limit.",
                )
            if sent != expected_bytes:
                fail(
                    f"with buckets of {bucket_bytes:,} bytes, rank {rank} sends messages of "
                    "the wrong sizes.",
                    expected=f"messages of {expected_bytes} bytes",
                    found=sent,
                    hint="Which gradient does backward compute first? Do buckets keep the dtype?",
                )
        _check_bytes(size, sum(ran.sent_bytes))
    yield "the same gradients, on 2, 3 and 4 ranks"
    yield "one message per bucket, the last parameter first, each of the right size"


@exercise(points=3)
def Overlapped(student: Student) -> Iterator[str]:
    """Overlapped(comm, model): hooks send each gradient while backward runs; finish() waits."""
    above = len(gradient_bytes()) - 2  # all but the first layer's gradients
    for size in (2, 3):
        ran = run(size, two_steps, student)
        for rank, (steps, unawaited) in enumerate(ran.values):
            for started, blocking, waited, _ in steps:
                if not started:
                    fail(
                        f"when backward reached the first layer, rank {rank} had started none of "
                        f"the {above} possible all-reduces: nothing overlaps.",
                        expected=f"{above} all-reduces, one for each gradient that was ready",
                        hint="A hook runs as soon as its gradient is ready: what can it start?",
                    )
                if blocking:
                    fail(
                        f"rank {rank} blocks in {blocking} all-reduces during backward.",
                        expected="calls that return at once",
                        hint="Which argument makes a collective return a handle?",
                    )
                if waited:
                    fail(
                        f"rank {rank} waited for {waited} of its handles before backward reached "
                        "the first layer.",
                        expected="no wait during backward",
                        hint="Keep the handle: which method may wait for it later?",
                    )
                if started != above:
                    fail(
                        f"when backward reached the first layer, rank {rank} had started {started} "
                        "all-reduces.",
                        expected=f"{above}, one for each gradient that was ready",
                    )
            if unawaited:
                fail(
                    f"rank {rank} never waits for {unawaited} of its all-reduces.",
                    expected="a wait for each all-reduce, in finish()",
                    hint="The all-reduce may still write to the tensor until wait() returns.",
                )
        for step in range(2):
            expected = right_gradients(size, seed=step)
            _check_gradients(size, [steps[step][3] for steps, _ in ran.values], expected, step)
        _only_all_reduces(ran, at_most=2 * len(gradient_bytes()))
        _check_bytes(size, sum(ran.sent_bytes), steps=2)
    yield "correct gradients in two steps, on 2 and 3 ranks"
    yield f"{above} of {above + 2} all-reduces in flight when backward reaches the first layer"


@exercise(points=3)
def accumulate(student: Student) -> Iterator[str]:
    """accumulate(ddp, parts): computes the gradient of the whole batch and sends it once."""
    for size, rows in [(2, [3, 3, 3, 3]), (2, [4, 4, 4, 1]), (3, [2, 1])]:
        ran = run(size, accumulated, student, rows)
        even = len(set(rows)) == 1
        _check_gradients(
            size, [gradients for gradients, _ in ran.values],
            right_gradients(size, rows=size * sum(rows)),
            context=f"with micro-batches of {rows} rows",
            hint="How much does one micro-batch weigh in the mean?" if even else
            "How much does a row weigh in a micro-batch of 1 row, and in one of 4?",
        )  # fmt: skip
        once, sent = 2 * (size - 1) * sum(gradient_bytes()), sum(x for _, x in ran.values)
        if sent != once:
            fail(
                f"with {len(rows)} micro-batches, {size} ranks send {sent:,} bytes in total, "
                f"{sent / once:g} × the necessary bytes.",
                expected=f"{once:,} bytes: all gradients once",
                hint="Which backward passes need not send? Run them under `with ddp.no_sync():`.",
            )
    yield "the gradient of the whole batch, from even and from uneven micro-batches"
    yield "all gradients sent once"


@exercise(points=3)
def choose_buckets(student: Student) -> Iterator[str | Score]:
    """choose_buckets(nbytes, ready_us): the number of gradients per bucket."""
    total_us = 0.0
    for name, speed in (("slow", SLOW), ("fast", FAST)):
        nbytes, ready_us = gradients_of(speed)
        ran = run(2, sent_in_buckets, student, nbytes, ready_us)
        for rank, counts in enumerate(ran.values):
            is_a_cut(rank, counts, len(nbytes))
        counts = ran.values[0]
        _assert_sent_as_cut([e.payload_bytes for e in ran.events[0]], counts, nbytes)
        exposed = exposed_us(counts, nbytes, ready_us)
        one_us = exposed_us([len(nbytes)], nbytes, ready_us)
        if exposed >= one_us:
            fail(
                f"on the {name} machine the ranks wait {exposed:,.0f} µs after backward, no less "
                "than with a single bucket.",
                expected=f"less than {one_us:,.0f} µs",
                hint="Few buckets start late, and many buckets add latency: try some sizes.",
            )
        total_us += exposed
    yield "each gradient in one bucket, sent by 2 ranks, for a slow and a fast machine"
    yield Score(round(total_us), BEST_US, "µs of waiting on both machines")


def _assert_sent_as_cut(sent: list[int], counts: list[int], nbytes: list[int]) -> None:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert sent == [sum(nbytes[i:j]) for i, j in pairwise(ends)], (
        "the score counts the buckets that were sent"
    )


# --- comparisons, with their messages


def _check_gradients(
    size: int,
    gradients_of_ranks: Sequence[Gradients],
    expected: dict[str, Tensor],
    step: int = 0,
    context: str = "",
    hint: str = "",
) -> None:
    """Fails unless all ranks' gradients equal those of a single process."""
    context = context or f"on {size} ranks" + (", in the second step" if step else "")
    for rank, gradients in enumerate(gradients_of_ranks):
        for name, correct in expected.items():
            actual = gradients[name]
            if actual is None:
                fail(f"{context}, rank {rank} has no gradient of {name}.", hint=hint)
            if not difference(actual, correct, 1e-5):
                continue
            ratio = float((actual * correct).sum() / (correct * correct).sum())
            if not difference(actual, ratio * correct, 1e-5):
                fail(
                    f"{context}, rank {rank}'s gradient of {name} is {ratio:.3g} × the correct "
                    "gradient.",
                    expected="the mean over the global batch",
                    hint=hint or "How many gradients did you add, and by what did you divide?",
                )
            fail(
                f"{context}, rank {rank}'s gradient of {name} is "
                f"{difference(actual, correct, 1e-5)}.",
                expected="the gradient of the global batch",
                hint=hint or "Does p.grad get the result? Is it the mean over all ranks?",
            )


def _only_all_reduces(ran: Ran, at_most: int | None = None) -> None:
    only(ran, ["all_reduce"], "only all-reduces")
    for rank, ops in enumerate(ran.ops):
        if at_most is not None and len(ops) > at_most:
            fail(
                f"rank {rank} calls {len(ops)} all-reduces.",
                expected=f"at most {at_most}, one for each gradient and step",
                hint="Do you send a gradient twice?",
            )


def _check_bytes(size: int, sent_bytes: int, steps: int = 1) -> None:
    expected = steps * 2 * (size - 1) * sum(gradient_bytes())
    if sent_bytes != expected:
        fail(
            f"{size} ranks send {sent_bytes:,} bytes in total.",
            expected=f"{expected:,} = 2(n-1) · P",
            hint="Send each gradient once, in its own dtype.",
        )
