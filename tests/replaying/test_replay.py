"""The virtual clock: published bubbles, the laws of every replay, and programs that cannot end."""

import csv
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import places
from labkit.replaying.engine import Compute, Deadlock, Issue, Program, Timed, Wait, run
from labkit.replaying.pipeline import bubble, pipeline_programs
from labkit.schedules import Action, one_f_one_b
from tables import cases, raises, refusals

# stages, micro-batches, milliseconds of forward, input gradient, weight gradient and message, and
# the bubble rate of 1F1B: arXiv 2401.10241, Tables 5 and 9.
with open(places.PUBLISHED / "bubble_rates_1f1b.csv") as file:
    PUBLISHED = [tuple(map(float, list(row.values())[1:])) for row in csv.DictReader(file)]


def test_a_schedule_that_cannot_be_is_no_pipeline() -> None:
    for wrong in (Action("backward", 0), Action("weight", 0)):
        lists = [one_f_one_b(1, 1)[0], [wrong]]
        raises("stage 1 never runs F0", pipeline_programs, lists, lambda stage, action: 1.0)


@pytest.mark.parametrize("row", PUBLISHED)
def test_the_bubble_of_1f1b_is_the_published_one(row: tuple[float, ...]) -> None:
    stages, microbatches, forward, inputs, weights, message, rate = row

    def seconds(stage: int, action: Action) -> float:
        return forward if action.phase == "forward" else inputs + weights

    schedule = one_f_one_b(int(stages), int(microbatches))
    times = run(pipeline_programs(schedule, seconds, message))
    found = bubble(schedule, max(one[-1].ended_s for one in times.values()), seconds)
    assert round(found, 4) == rate


def reduce(key: str, seconds: float = 1.0, ranks: tuple[int, ...] = (0, 1), **more: Any) -> Issue:
    return Issue(key, ranks, seconds, **more)


def test_an_operation_runs_beside_computing_from_when_its_last_rank_has_issued_it() -> None:
    program = [Compute(1.0), reduce("a", 3.0), Compute(2.0), Wait("a"), Compute(1.0)]
    times = run({0: program, 1: program})
    assert times[0] == times[1] == [(0, 1), (1, 4), (1, 3), (3, 4), (4, 5)]
    times = run({r: [Compute(float(r)), reduce("a"), Wait("a")] for r in (0, 1)})
    assert times[0][1:] == [(1, 2), (0, 2)]
    assert times[1][1:] == [(1, 2), (1, 2)]


def test_ports_carry_one_after_the_other_and_latency_does_not_hold_them() -> None:
    program = [reduce("a"), reduce("b"), reduce("c", port="other"), Wait("c"), Wait("b")]
    times = run({0: program, 1: program})
    assert times[0] == [(0, 1), (1, 2), (0, 1), (0, 1), (1, 2)]
    messages = [Issue(key, (0,), 1.0, latency_s=5.0) for key in "ab"]
    assert run({0: messages, 1: [Wait("b")]}) == {0: [(0, 6), (1, 7)], 1: [(0, 7)]}


def test_a_thousand_ranks_take_no_longer_for_each_record_than_a_few() -> None:
    """As many events at the ports as there are ranks, and no more: counted, not timed."""
    looked_at = []

    class Ranks(tuple):
        def __iter__(self):
            looked_at.append(self)
            return super().__iter__()

        __hash__ = tuple.__hash__

    n = 1000
    issues = [Issue(k, Ranks(range(n)), 1.0) for k in range(5)]
    times = run({rank: [*issues, Wait(4)] for rank in range(n)})
    assert times[n - 1][-1] == (0, 5)
    assert len(looked_at) < 5 * 10


def test_a_deadlock_is_reported_in_short_with_its_cycle_if_there_is_one() -> None:
    programs = {r: [Wait(("to", r)), Issue(("to", (r + 1) % 3), (r,), 1.0)] for r in range(3)}
    words = r"rank 0 waits for \('to', 0\), which rank 2 has yet to issue"
    assert raises(words, run, programs, error=Deadlock).cycle == (0, 2, 1)
    n = 300  # reported in short
    programs = {r: [Wait(r), Issue((r + 1) % n, (r,), 1.0)] for r in range(n)}
    reported = raises("", run, programs, error=Deadlock)
    assert len(reported.cycle) == n and len(str(reported)) < 500
    programs = {  # behind a rank that is in no cycle
        0: [Wait("nothing")],
        1: [Wait(None), Issue("a", (1,), 1.0)],
        2: [Wait("a"), Issue(None, (2,), 1.0)],
    }
    assert set(raises("", run, programs, error=Deadlock).cycle) == {1, 2}
    programs = {0: [reduce("a"), Wait("a"), reduce("b", ranks=(0,))], 1: [Wait("b")]}
    words = "rank 0 waits for 'a', which rank 1 never issues"
    assert raises(words, run, programs, error=Deadlock).cycle == ()


def test_collectives_in_different_orders_are_a_deadlock() -> None:
    a, b = reduce("a"), reduce("b")
    words = (
        "'a', which on rank 1 is queued after 'b'",
        "rank 1 must first run 'b', which on rank 0 is queued after 'a'",
    )
    for waits in ([], [Wait("a"), Wait("b")]):
        programs = {0: [a, b, *waits], 1: [b, a, *waits[::-1]]}
        assert set(raises(words, run, programs, error=Deadlock).cycle) == {0, 1}


test_mismatched_programs_are_reported = refusals(
    run,
    ({0: [reduce("a")], 1: []}, "rank 0 has issued 'a', which rank 1 never issues"),
    ({0: [Wait("a")]}, "rank 0 waits for 'a', which no rank issues"),
    ({0: [reduce("a"), reduce("b"), Wait("b")], 1: [reduce("b")]},
     "on rank 0 is queued after 'a'; rank 0 must first run 'a', which rank 1 never"),
    ({0: [reduce("a")], 1: [reduce("a", 2.0)]}, "but others issue"),
    ({0: [reduce("a", ranks=(1,))], 1: []}, "is not one of its ranks"),
    ({0: [reduce("a", ranks=(0,)), reduce("a", ranks=(0,))]}, "twice"),
    ({0: [Compute(-1.0)]}, "negative time"),
    ({0: [Compute(float("nan"))]}, "negative time"),
    ({0: [reduce("a", -1.0, ranks=(0,))]}, "negative time"),
    ({0: [reduce("a", ranks=(0, 7))]}, "rank 7 has no program"),
    ({0: [reduce("a", ranks=(0, 0))]}, "names a rank twice"),
    ({0: ["oops"]}, "the program contains 'oops'"),
)  # fmt: skip


def some_programs(seed: int) -> dict[int, Program]:
    """Ranks that compute, reduce in groups and send to each other. All draw from one list of
    operations and wait for each somewhere behind it, so none can hang."""
    draw = random.Random(seed)
    size = draw.randint(1, 5)
    programs: dict[int, list[Compute | Issue | Wait]] = {rank: [] for rank in range(size)}
    for key in range(draw.randint(1, 12)):
        for program in programs.values():
            program += [Compute(draw.choice([0.0, 0.5, draw.random()]))] * draw.randint(0, 2)
        members = tuple(sorted(draw.sample(range(size), draw.randint(1, size))))
        port = draw.choice(["inside", "between"])
        issue = Issue(key, members, draw.random(), draw.choice([0.0, 0.3]), port)
        for rank in members:
            programs[rank].append(issue)
        for rank in {*members, draw.randrange(size)}:
            if draw.random() < 0.7:
                programs[rank].append(Wait(key))
    return dict(programs)


def broken_laws(programs: dict[int, Program], times: dict[int, list[Timed]]) -> list[str]:
    broken = []
    operations: dict[object, set[Timed]] = defaultdict(set)
    for rank, program in programs.items():
        for item, timed in zip(program, times[rank], strict=True):
            if isinstance(item, Issue):
                operations[item.key].add(timed)
    earliest_s: dict[object, float] = defaultdict(float)
    for rank, program in programs.items():
        now_s, free_s = 0.0, defaultdict[str, float](float)
        for item, timed in zip(program, times[rank], strict=True):
            if isinstance(item, Issue):
                carried_s = timed.began_s + item.seconds
                if timed.ended_s != carried_s + item.latency_s:
                    broken.append("an operation takes another time than its cost")
                if timed.began_s < free_s[item.port]:
                    broken.append("a port carries two operations at once")
                earliest_s[item.key] = max(earliest_s[item.key], now_s, free_s[item.port])
                free_s[item.port] = carried_s
                continue
            if timed.began_s != now_s:
                broken.append("a rank is neither busy nor idle")
            if isinstance(item, Compute) and timed.ended_s != timed.began_s + item.seconds:
                broken.append("computing takes another time than its cost")
            if isinstance(item, Wait) and timed.ended_s not in {
                max(now_s, done.ended_s) for done in operations[item.key]
            }:
                broken.append("a rank goes on before, or after, what it waits for")
            now_s = timed.ended_s
    for key, seen in operations.items():
        began_s = min(timed.began_s for timed in seen)
        if began_s < earliest_s[key]:
            broken.append("an operation begins before it is issued, or its ports are free")
        if began_s > earliest_s[key]:
            broken.append("an operation begins later than it could")
        if len(seen) > 1:
            broken.append("an operation has different times on its ranks")
    return broken


@given(st.integers(0, 10**9))
def test_every_replay_keeps_the_laws(seed: int) -> None:
    programs = some_programs(seed)
    times = run(programs)
    assert broken_laws(programs, times) == []
    backwards = dict(reversed(programs.items()))
    assert run(backwards) == times, "the order in which ranks are looked at changes nothing"


PROGRAM = [Compute(1.0), reduce("a", 1.0), reduce("b", 1.0), Compute(0.5), Wait("b")]


@cases(
    (0, [0], (0.0, -0.25), "computing takes another time"),
    (3, [0], (0.25, 0.25), "neither busy nor idle"),
    (2, [0, 1], (0.0, 0.5), "an operation takes another time"),
    (4, [0], (0.0, -0.25), "before, or after, what it waits for"),
    (1, [0, 1], (-0.5, -0.5), "before it is issued"),
    (2, [0, 1], (-0.5, -0.5), "carries two operations at once"),
    (2, [0, 1], (0.5, 0.5), "later than it could"),
    (2, [1], (0.5, 0.5), "different times on its ranks"),
)
def test_each_law_can_break(
    place: int, ranks: list[int], by: tuple[float, float], law: str
) -> None:
    programs: dict[int, Program] = {0: PROGRAM, 1: PROGRAM}
    times = run(programs)
    assert broken_laws(programs, times) == []
    for rank in ranks:
        began_s, ended_s = times[rank][place]
        times[rank][place] = Timed(began_s + by[0], ended_s + by[1])
    assert law in "; ".join(broken_laws(programs, times))
