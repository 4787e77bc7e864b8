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
        _compare(size, [its for its, _ in ran.values], right_gradients(size))
        for rank, (_, weights) in enumerate(ran.values):
            if any(
                difference(w, p.detach(), 0) for w, p in zip(weights, small_model().parameters())
            ):
                fail(
                    f"rank {rank} has other weights than before.",
                    expected="the weights as they were: the optimizer changes them, later",
                    hint="It is the gradients that are averaged.",
                )
        _only_all_reduces(ran, at_most=len(gradient_bytes()))
        _bytes(size, sum(ran.sent_bytes))
    yield "every gradient is the mean, on 2, 3 and 4 ranks"
    yield "2(n-1)/n · P bytes sent by a rank, no byte more"


@exercise(points=3)
def average_in_buckets(student: Student) -> Iterator[str]:
    """average_in_buckets(comm, model, bucket_bytes): the same, in one message per bucket."""
    for size, bucket_bytes in [(2, 200), (3, 100), (4, 10**6)]:
        ran = run(size, after_backward, partial(student, bucket_bytes=bucket_bytes))
        _compare(size, [its for its, _ in ran.values], right_gradients(size))
        _only_all_reduces(ran)
        buckets = cut(list(small_model().parameters()), bucket_bytes)
        wanted = [sum(p.nbytes for p in bucket) for bucket in buckets]
        for rank, events in enumerate(ran.events):
            sent = [event.payload_bytes for event in events]
            if len(sent) != len(wanted):
                fail(
                    f"with buckets of {bucket_bytes:,} bytes, rank {rank} sends {len(sent)} "
                    f"message{'s' * (len(sent) != 1)}, but {len(wanted)} "
                    f"{'are' if len(wanted) > 1 else 'is'} right.",
                    expected=f"messages of {wanted} bytes",
                    found=sent,
                    hint="Open a new bucket when the next gradient would make it too large.",
                )
            if sent != wanted:
                fail(
                    f"with buckets of {bucket_bytes:,} bytes, rank {rank} fills them in another "
                    "way.",
                    expected=f"messages of {wanted} bytes",
                    found=sent,
                    hint="Which gradient does backward make first? Is the dtype still the same?",
                )
        _bytes(size, sum(ran.sent_bytes))
    yield "the same gradients, on 2, 3 and 4 ranks"
    yield "one message per bucket, the last parameter first, each of the right size"


@exercise(points=3)
def Overlapped(student: Student) -> Iterator[str]:
    """Overlapped(comm, model): hooks send each gradient while backward runs; finish() waits."""
    above = len(gradient_bytes()) - 2  # all but those of the first layer
    for size in (2, 3):
        ran = run(size, two_steps, student)
        for rank, (steps, never_waited_for) in enumerate(ran.values):
            for asked, blocking, waited, _ in steps:
                if not asked:
                    fail(
                        f"when backward came to the first layer, rank {rank} had asked for none "
                        f"of the {above} all-reduces that were possible: nothing overlaps.",
                        expected=f"{above} of them, one for each gradient that was there",
                        hint="The hook is the place that knows when a gradient is there.",
                    )
                if blocking:
                    fail(
                        f"rank {rank} stands still in {blocking} all-reduces during backward.",
                        expected="calls that return at once",
                        hint="Which argument makes an operation return a handle?",
                    )
                if waited:
                    fail(
                        f"rank {rank} has waited for {waited} of its handles before backward came "
                        "to the first layer.",
                        expected="no wait during backward",
                        hint="Keep the handle; who may wait for it later?",
                    )
                if asked != above:
                    fail(
                        f"when backward came to the first layer, rank {rank} had asked for {asked} "
                        "all-reduces.",
                        expected=f"{above}: one for each gradient that was there",
                    )
            if never_waited_for:
                fail(
                    f"rank {rank} never waits for {never_waited_for} of its all-reduces.",
                    expected="a wait for each, in finish()",
                    hint="A tensor belongs to the operation until wait() returns.",
                )
        for step in range(2):
            right = right_gradients(size, seed=step)
            _compare(size, [steps[step][3] for steps, _ in ran.values], right, step)
        _only_all_reduces(ran, at_most=2 * len(gradient_bytes()))
        _bytes(size, sum(ran.sent_bytes), steps=2)
    yield "the right gradients in two steps, on 2 and 3 ranks"
    yield f"{above} of {above + 2} all-reduces under way before backward comes to the first layer"


@exercise(points=3)
def accumulate(student: Student) -> Iterator[str]:
    """accumulate(ddp, parts): the gradient of the whole batch, sent once."""
    for size, rows in [(2, [3, 3, 3, 3]), (2, [4, 4, 4, 1]), (3, [2, 1])]:
        ran = run(size, accumulated, student, rows)
        even = len(set(rows)) == 1
        _compare(
            size, [its for its, _ in ran.values], right_gradients(size, rows=size * sum(rows)),
            where=f"with parts of {rows} rows",
            hint="What does one micro-batch count in the mean?" if even else
            "How much does a row count in a part of 1 row, and how much in one of 4?",
        )  # fmt: skip
        once, sent = 2 * (size - 1) * sum(gradient_bytes()), sum(x for _, x in ran.values)
        if sent != once:
            fail(
                f"with {len(rows)} micro-batches, {size} ranks send {sent:,} bytes together, "
                f"{sent / once:g} × what is needed.",
                expected=f"{once:,} bytes: all gradients once",
                hint="Which backwards need not send? `with ddp.no_sync():` holds them back.",
            )
    yield "the gradient of the whole batch, from even and from uneven micro-batches"
    yield "all gradients sent once"


@exercise(points=3)
def choose_buckets(student: Student) -> Iterator[str | Score]:
    """choose_buckets(nbytes, ready_us): how many gradients each bucket takes."""
    total_us = 0.0
    for name, speed in (("slow", SLOW), ("fast", FAST)):
        nbytes, ready_us = gradients_of(speed)
        ran = run(2, sent_in_buckets, student, nbytes, ready_us)
        for rank, counts in enumerate(ran.values):
            is_a_cut(rank, counts, len(nbytes))
        counts = ran.values[0]
        _sent_as_cut([e.payload_bytes for e in ran.events[0]], counts, nbytes)
        exposed = exposed_us(counts, nbytes, ready_us)
        one_us = exposed_us([len(nbytes)], nbytes, ready_us)
        if exposed >= one_us:
            fail(
                f"on the {name} machine the ranks wait {exposed:,.0f} µs after backward, no less "
                "than with one bucket for everything.",
                expected=f"less than {one_us:,.0f} µs",
                hint="Too few buckets leave late, too many pay for the latency: try some sizes.",
            )
        total_us += exposed
    yield "every gradient in one bucket, sent by 2 ranks, for a slow and a fast machine"
    yield Score(round(total_us), BEST_US, "µs of waiting on both machines")


def _sent_as_cut(sent: list[int], counts: list[int], nbytes: list[int]) -> None:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert sent == [sum(nbytes[i:j]) for i, j in pairwise(ends)], "what is scored is what was sent"


# --- comparisons, with their messages


def _compare(
    size: int,
    found: Sequence[Gradients],
    right: dict[str, Tensor],
    step: int = 0,
    where: str = "",
    hint: str = "",
) -> None:
    """Fails unless all ranks' gradients equal those of a single process."""
    place = where or f"on {size} ranks" + (", in the second step" if step else "")
    for rank, its in enumerate(found):
        for name, good in right.items():
            mine = its[name]
            if mine is None:
                fail(f"{place}, rank {rank} has no gradient of {name}.", hint=hint)
            if not difference(mine, good, 1e-5):
                continue
            ratio = float((mine * good).sum() / (good * good).sum())
            if not difference(mine, ratio * good, 1e-5):
                fail(
                    f"{place}, rank {rank}'s gradient of {name} is {ratio:.3g} × the right one.",
                    expected="the mean over the global batch",
                    hint=hint or "The sum of how many? The mean of how many?",
                )
            fail(
                f"{place}, rank {rank}'s gradient of {name} is not that of the global batch: "
                f"{difference(mine, good, 1e-5)}.",
                hint=hint or "Does the result come back into p.grad? Is it everybody's mean?",
            )


def _only_all_reduces(ran: Ran, at_most: int | None = None) -> None:
    only(ran, ["all_reduce"], "all-reduces alone")
    for rank, its in enumerate(ran.ops):
        if at_most is not None and len(its) > at_most:
            fail(
                f"rank {rank} calls {len(its)} all-reduces.",
                expected=f"{at_most}, one for each gradient",
                hint="Does something travel twice?",
            )


def _bytes(size: int, sent_bytes: int, steps: int = 1) -> None:
    right = steps * 2 * (size - 1) * sum(gradient_bytes())
    if sent_bytes != right:
        fail(
            f"{size} ranks send {sent_bytes:,} bytes together.",
            expected=f"{right:,} = 2(n-1) · P",
            hint="Each gradient travels once, in its own dtype.",
        )
