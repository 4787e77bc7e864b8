"""What is true of every recorded run. A trace that breaks a law was recorded or read wrongly. Times
come from one clock of the rank's machine, but from several threads and GPUs: TOLERANCE_S covers
that."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from labkit.events import CommEvent
from labkit.trace.graph import CATEGORIES, RankTrace, Span, Step, Trace

TOLERANCE_S = 20e-6

# In these, the whole has the same size on all ranks; in others, ranks may give and get unequally.
EQUAL_BYTES = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "barrier")


def broken_laws(trace: Trace) -> list[str]:
    """A sentence for each broken law. What a damaged trace has lost is not held against it."""
    found: list[str] = []
    for one in trace.ranks.values():
        times = (_steps_follow_each_other, _ends_follow_begins, _events_go_forward)
        spans = (_spans_nest, _spans_lie_in_their_step, _nothing_is_open)
        for law in (*times, *spans, _carriers_do_one_at_a_time, _memory_is_in_order):
            found += [f"rank {one.rank}: {what}" for what in law(one)]
    for law in (_collectives_have_all_ranks, _messages_have_both_ends, _numbers_have_no_holes):
        found += law(trace)
    return found


def _steps_follow_each_other(one: RankTrace) -> Iterator[str]:
    for last, step in pairwise(one.steps):
        if step.index <= last.index or _later(last.ended_s or last.began_s, step.began_s):
            where = f"{_name(last)}, which goes to {_at(last.ended_s)}"
            yield f"{_name(step)}, from {_at(step.began_s)} on, does not follow {where}"


def _ends_follow_begins(one: RankTrace) -> Iterator[str]:
    things: list[Step | Span] = [*one.steps, *one.spans]
    for thing in things:
        if thing.ended_s and _later(thing.began_s, thing.ended_s):
            begins = f"before it begins at {_at(thing.began_s)}"
            yield f"{_name(thing)} ends at {_at(thing.ended_s)}, {begins}"


def _spans_nest(one: RankTrace) -> Iterator[str]:
    around: list[Span] = []
    ended = [span for span in one.spans if span.ended_s]
    for span in sorted(ended, key=lambda x: (x.began_s, -x.ended_s)):
        while around and not _later(around[-1].ended_s, span.began_s):
            around.pop()
        if around and _later(span.ended_s, around[-1].ended_s):
            outer = f"{_name(around[-1])}, {_from_to(around[-1])}"
            yield f"{_name(span)}, {_from_to(span)}, lies half inside {outer}"
        around.append(span)


def _spans_lie_in_their_step(one: RankTrace) -> Iterator[str]:
    """But for the users' own: a span of theirs may hold several steps, or none."""
    steps = {step.index: step for step in one.steps}
    for span in (x for x in one.spans if x.phase != "user"):
        step = steps.get(span.step)
        if step is None:
            if one.complete:
                yield f"{_name(span)} is of step {span.step}, which is not there"
        elif _later(step.began_s, span.began_s) or (
            step.ended_s and _later(span.ended_s, step.ended_s)
        ):
            outer = f"{_name(step)}, {_from_to(step)}"
            yield f"{_name(span)}, {_from_to(span)}, lies outside {outer}"


def _events_go_forward(one: RankTrace) -> Iterator[str]:
    for event in one.comms:
        order: list[tuple[str, str]] = []
        if event.ended_s:
            order += [("issued_s", "began_s"), ("began_s", "ended_s")]
        if event.wait_ended_s:
            order += [("issued_s", "wait_began_s"), ("wait_began_s", "wait_ended_s")]
            order += [("ended_s", "wait_ended_s")]
        for before, after in order:
            if _later(getattr(event, before), getattr(event, after)):
                late_s, early_s = getattr(event, before), getattr(event, after)
                earlier = f"earlier than {before} = {_at(late_s)}"
                yield f"{_name(event)} has {after} = {_at(early_s)}, {earlier}"


def _carriers_do_one_at_a_time(one: RankTrace) -> Iterator[str]:
    """The thread of a group ("lane") and the program's own ("caller") do one thing at a time."""
    carried: dict[str, list[CommEvent]] = defaultdict(list)
    for event in one.comms:
        if event.ended_s and event.lane in ("lane", "caller"):
            by = "the caller" if event.lane == "caller" else f"the lane of group {event.group}"
            carried[by].append(event)
    for by, events in carried.items():
        for last, event in pairwise(sorted(events, key=lambda x: (x.began_s, x.ended_s))):
            if _later(last.ended_s, event.began_s):
                other = f"while {_name(last)} lasts to {_at(last.ended_s)}"
                yield f"{by} carries {_name(event)} from {_at(event.began_s)} on, {other}"


def _memory_is_in_order(one: RankTrace) -> Iterator[str]:
    for last, point in pairwise(one.memory):
        if point.when_s < last.when_s:
            yield f"memory at {_at(point.when_s)} comes after memory at {_at(last.when_s)}"
    for point in one.memory:
        held = point.held_bytes
        if len(held) != len(CATEGORIES):
            counts = f"{len(held)} categories, not {len(CATEGORIES)}"
            yield f"memory at {_at(point.when_s)} has {counts}"
        for category, nbytes in zip(CATEGORIES, held):
            if nbytes < 0:
                yield f"{category} hold {nbytes} bytes at {_at(point.when_s)}, less than none"


def _nothing_is_open(one: RankTrace) -> Iterator[str]:
    for thing in one.timed_records():
        if one.complete and not thing.ended_s:
            yield f"{_name(thing)} never ended, though the rank's record is whole"


def _collectives_have_all_ranks(trace: Trace) -> Iterator[str]:
    for (group, seq), events in trace.collectives().items():
        first_rank, first = next(iter(events.items()))
        for rank in first.ranks:
            if rank not in events and _recorded_all(trace, rank):
                yield f"rank {rank}: {_name(first)} is missing, which rank {first_rank} has"
        for rank, event in events.items():
            names = ["op", "dtype", "ranks"]
            if first.op in EQUAL_BYTES and event.op == first.op:
                names.append("payload_bytes")
            for name in names:
                here, there = getattr(event, name), getattr(first, name)
                if here != there:
                    yield (
                        f"rank {rank}: collective {seq} of group {group} has {name} {here}, but "
                        f"{there} on rank {first_rank}"
                    )


def _messages_have_both_ends(trace: Trace) -> Iterator[str]:
    for key, ends in trace.messages().items():
        what = f"message {key.seq} to rank {key.target}, tag {key.tag}, group {key.group}"
        if len(ends) == 2:
            sent_bytes, got_bytes = ends["send"].payload_bytes, ends["recv"].payload_bytes
            if sent_bytes != got_bytes:
                yield (
                    f"rank {key.source}: {what}, is sent with {sent_bytes} bytes and received "
                    f"with {got_bytes}"
                )
        elif "recv" in ends and _recorded_all(trace, key.source):
            yield f"rank {key.source}: {what}, is received, but was never sent"
        elif "send" in ends and _recorded_all(trace, key.target):
            yield f"rank {key.source}: {what}, is sent, but was never received"


def _numbers_have_no_holes(trace: Trace) -> Iterator[str]:
    """Except among collectives, where subgroups and compared notes take numbers, too. What one rank
    has lost, the others have."""
    for one in trace.ranks.values():
        numbers: dict[tuple[str, bool], list[int]] = defaultdict(list)
        for event in one.comms if one.complete else ():
            if event.op in ("send", "recv"):
                way = f"{'to' if event.op == 'send' else 'from'} rank {event.ranks[event.peer]}"
                what = f"messages {way}, tag {event.tag}, group {event.group}"
                numbers[what, False].append(event.seq)
            else:
                numbers[f"collectives of group {event.group}", True].append(event.seq)
        for (what, holes), seqs in numbers.items():
            for last, seq in pairwise(sorted(seqs)):
                if seq == last or (seq > last + 1 and not holes):
                    yield f"rank {one.rank}: the {what} go from number {last} to {seq}"


def _recorded_all(trace: Trace, rank: int) -> bool:
    return rank in trace.ranks and trace.ranks[rank].complete


def _later(one_s: float, other_s: float) -> bool:
    """Whether `one_s` is after `other_s`, by more than the clocks' tolerance."""
    return one_s > other_s + TOLERANCE_S


def _at(time_s: float) -> str:
    return f"{time_s:.6f} s"


def _from_to(thing: Span | Step) -> str:
    return f"{thing.began_s:.6f} to {thing.ended_s:.6f} s"


def _name(thing: Span | Step | CommEvent) -> str:
    if isinstance(thing, Step):
        return f"step {thing.index}"
    if isinstance(thing, Span):
        return f"{thing.phase} of {thing.module or 'the whole model'} in step {thing.step}"
    return f"{thing.op} {thing.seq} of group {thing.group}"
