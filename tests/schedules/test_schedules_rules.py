"""`check` names the first broken rule, as an oracle that shares no code with it does."""

import pickle
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.schedules import (
    Action,
    Schedule,
    ScheduleError,
    check,
    one_f_one_b,
    parse,
    parse_schedule,
    peak_in_flight,
    run_order,
    show,
)
from schedule_cases import Case, can_end, cases, made, own_order
from tables import raises, refusals


def fault(schedule: Schedule, microbatches: int | None = None) -> ScheduleError | None:
    try:
        check(schedule, microbatches)
    except ScheduleError as error:
        return error
    return None


def drawn_stage(case: Case, data: st.DataObject) -> tuple[Schedule, int, list[Action]]:
    schedule = made(case)
    stage = data.draw(st.integers(0, len(schedule) - 1))
    schedule[stage] = list(schedule[stage])
    return schedule, stage, schedule[stage]


@given(cases(largest=12), st.data())
@settings(max_examples=250, deadline=None)
def test_two_actions_swapped_are_found_unless_it_does_no_harm(case: Case, data: st.DataObject):
    schedule, stage, actions = drawn_stage(case, data)
    i, j = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
    actions[i], actions[j] = actions[j], actions[i]
    error, broken = fault(schedule, case[2]), own_order(actions)
    if broken:
        assert error is not None and error.rule in broken
        assert error.stage == stage and error.position is not None
        assert actions[error.position] == error.action
    elif not can_end(schedule):
        assert error is not None and error.rule == "deadlock"
    else:
        assert error is None


def test_swaps_of_each_kind_occur() -> None:
    """The test above would prove nothing if none of its swaps did harm, or all."""
    kinds = set()
    for name in ("1f1b", "zb-h1", "pipedream"):
        for i, j in combinations(range(8), 2):
            schedule = made((name, 3, 4, 1))
            actions = schedule[1] = list(schedule[1])
            actions[i], actions[j] = actions[j], actions[i]
            error = fault(schedule)
            kinds.add(error.rule if error else "harmless")
    orders = {"backward after forward", "weight after input", "update after backward"}
    assert kinds == {"harmless", "deadlock", *orders}


@given(cases(largest=12), st.data())
@settings(max_examples=120, deadline=None)
def test_an_action_that_is_dropped_is_found(case: Case, data: st.DataObject):
    schedule, stage, actions = drawn_stage(case, data)
    dropped = actions.pop(data.draw(st.integers(0, len(actions) - 1)))
    error = fault(schedule, case[2])
    if dropped.phase == "update":
        updates = sum(one.phase == "update" for each in schedule for one in each)
        assert (error.rule if error else None) == ("all update or none" if updates else None)
    else:
        assert error is not None and error.rule == "exactly once"
    if error:
        assert error.stage == stage and f"never runs {dropped}" in str(error)


@given(cases(largest=12), st.data())
@settings(max_examples=120, deadline=None)
def test_an_action_that_is_doubled_is_found(case: Case, data: st.DataObject):
    schedule, stage, actions = drawn_stage(case, data)
    doubled = data.draw(st.sampled_from(actions))
    actions.insert(data.draw(st.integers(0, len(actions))), doubled)
    error = fault(schedule, case[2])
    assert error is not None and error.rule == "exactly once"
    places = [place for place, one in enumerate(actions) if one == doubled]
    assert (error.stage, error.action, error.position) == (stage, doubled, places[1])
    assert f"at position {places[0]} and again at position {places[1]}" in str(error)


@given(cases(largest=12), st.data())
@settings(max_examples=120, deadline=None)
def test_an_action_that_became_another_is_found(case: Case, data: st.DataObject):
    schedule, _, actions = drawn_stage(case, data)
    place = data.draw(st.integers(0, len(actions) - 1))
    one = actions[place]
    half = {"backward": "input", "input": "backward", "weight": "backward"}.get(one.phase)
    changes = [
        {"microbatch": one.microbatch + 1},
        {"microbatch": -1},
        {"chunk": one.chunk + 1},
        {"phase": "backwards"},
        *([{"phase": half}] if half else []),
    ]
    actions[place] = one._replace(**data.draw(st.sampled_from(changes)))
    error = fault(schedule, case[2])
    assert error is not None
    assert error.rule in {"known actions", "exactly once", "one backward", "all update or none"}


test_the_first_broken_rule_is_reported = refusals(
    lambda text: check(parse_schedule(text)),
    ("F0 F1 B0", "exactly once: stage 0 never runs B1 .nor I1 and W1."),
    ("F0 F0 B0", "exactly once: stage 0 runs F0 at position 0 and again at position 1"),
    ("F0 F1 B0 B1\nF0 B0", "exactly once: stage 1 never runs F1"),
    ("F0 I0", "exactly once: stage 0 never runs W0, the other half of I0"),
    ("F0 W0", "exactly once: stage 0 never runs I0, the other half of W0"),
    ("F0 B0 F0.1 B0.1\nF0 B0", "exactly once: stage 1 never runs F0.1"),
    (
        "F0 B0 W0",
        "one backward: stage 0 runs W0 at position 2, but also B0, which includes both halves",
    ),
    ("F0 I0 B0 W0", "one backward: stage 0 runs I0 at position 1"),
    ("F0 B0 U0\nF0 B0", "all update or none: stage 1 never runs U0"),
    ("B0 F0", "backward after forward: stage 0 runs B0 at position 0, before its F0 at pos"),
    ("F0 B0\nI0 F0 W0", "backward after forward: stage 1 runs I0 at position 0"),
    ("F0 W0 I0", "weight after input: stage 0 runs W0 at position 1, before its I0"),
    ("F0 U0 B0", "update after backward: stage 0 runs U0 at position 1, before its B0"),
    ("F0 I0 U0 W0", "update after backward: stage 0 runs U0 at position 2, before its W0"),
    (
        "F0 B0 F1 B1\nF0 F1 B0 B1",
        "deadlock: stage 0, position 1: B0 waits for B0 of stage 1, which comes after F1 "
        "there; stage 1, position 1: F1 waits for F1 of stage 0, which comes after B0 there",
    ),
    ("F0.1 F0 B0.1 B0", "deadlock: stage 0, position 0: F0.1 waits for F0 of stage 0"),
    ("", "this schedule has no actions"),
    error=ScheduleError,
)


def test_missing_actions_are_reported_before_order_and_order_before_deadlocks() -> None:
    everything = "B0 F0 F1 B1\nF0 F1 B0"
    assert fault(parse_schedule(everything)).rule == "exactly once"
    assert fault(parse_schedule(everything + " B1")).rule == "backward after forward"


def test_as_many_micro_batches_as_are_wanted() -> None:
    for wanted, message in ((3, "never runs F2"), (1, "F1 at position 1, but there are 1 micro")):
        raises(message, check, one_f_one_b(2, 2), microbatches=wanted, error=ScheduleError)
    check(one_f_one_b(2, 2), microbatches=2)


def test_a_long_cycle_is_abbreviated() -> None:
    schedule = [parse("F0 F0.1 B0.1 B0") for _ in range(8)]
    check(schedule)
    schedule[0] = parse("F0.1 F0 B0.1 B0")
    error = fault(schedule)
    assert error is not None and error.rule == "deadlock" and len(str(error)) < 600
    assert "stage 0, position 0: F0.1 waits for F0 of stage 7, which comes" in str(error)
    assert "... (3 more)" in str(error)


test_an_invalid_action_is_reported = refusals(
    lambda action: check([[action]]),
    (("forward", 0), "stage 0, position 0 has .'forward', 0.; pass an Action"),
    (Action("foward", 0), "phase 'foward'; choose one of forward, backward"),
    (Action("forward", -1), "micro-batch -1 on chunk 0; both count from 0"),
    error=ScheduleError,
)


def test_text_is_read_in_either_case_and_a_word_that_is_no_action_is_named() -> None:
    for wrong in ("F0 X1", "F0 F", "F0 0F", "F0 F1.", "F0 F-1"):
        raises("word 1 of .* is not an action; write one letter of F B I", parse, wrong)
    assert parse("f0 b0.2") == [Action("forward", 0), Action("backward", 0, 2)]


def test_a_broken_rule_comes_whole_from_a_rank() -> None:
    error = fault(parse_schedule("F0 B0\nB0 F0"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)
    assert (again.stage, again.position, str(again.action)) == (1, 0, "B0")


def test_halves_and_wholes_may_be_mixed() -> None:
    """A student's schedule may split where it helps."""
    mixed = parse_schedule("F0 F1 B0 I1 W1\nF0 I0 F1 B1 W0")
    check(mixed)
    assert peak_in_flight(mixed) == [2, 2]
    order = run_order(mixed)
    assert sorted(order) == [(s, k) for s in range(2) for k in range(5)]
    assert order.index((1, 0)) > order.index((0, 0)), "F0 of stage 1 after that of stage 0"


@given(cases(largest=16))
@settings(max_examples=60, deadline=None)
def test_a_shown_schedule_is_parsed_back(case: Case) -> None:
    schedule = made(case)
    assert parse_schedule(show(schedule)) == schedule
    assert [parse(" ".join(map(str, actions))) for actions in schedule] == schedule


def test_what_cannot_run_is_not_shown() -> None:
    raises("deadlock", show, parse_schedule("F0 B0 F1 B1\nF0 F1 B0 B1"), error=ScheduleError)
