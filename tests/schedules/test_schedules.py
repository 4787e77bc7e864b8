"""Every pipeline schedule keeps the rules and its promised peak; invalid sizes are refused."""

import doctest
import re
from collections import Counter
from importlib import import_module
from itertools import product

import pytest
from hypothesis import given, settings

from labkit.schedules import (
    SCHEDULES,
    Action,
    check,
    chunks_of,
    interleaved,
    microbatches_of,
    one_f_one_b,
    parse,
    peak_in_flight,
    pipedream,
    received,
    schedule,
    sent,
    show,
    stage_and_chunk,
    virtual_stage,
)
from schedule_cases import PROMISES, Case, can_end, cases, made, own_order, promised_peaks
from tables import raises, refusals


@given(cases())
@settings(max_examples=150, deadline=None)
def test_a_schedule_keeps_the_rules_and_its_promised_peak(case: Case) -> None:
    name, p, m, v = case
    stages = made(case)
    check(stages, microbatches=m)
    assert (len(stages), chunks_of(stages), microbatches_of(stages)) == (p, v, m)
    phases = ["forward", "input", "weight"] if "zb" in name else ["forward", "backward"]
    phases += ["update"] * (name == "pipedream")
    expected = {Action(*action) for action in product(phases, range(m), range(v))}
    for actions in stages:
        assert len(actions) == len(expected) and set(actions) == expected, "each exactly once"
        assert not own_order(actions)
    assert can_end(stages)
    assert peak_in_flight(stages) == promised_peaks(case)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_what_one_stage_sends_another_needs(case: Case) -> None:
    """Each message once, between neighbours, with the last before the first."""
    _, p, m, v = case
    ways = {"source": Counter(), "target": Counter()}
    for stage, actions in enumerate(made(case)):
        for action in actions:
            for here, message_of in (("source", sent), ("target", received)):
                message = message_of(action, stage, p, v)
                if message is not None:
                    ways[here][message] += 1
                    assert stage_and_chunk(getattr(message, here), p) == (stage, action.chunk)
                    assert abs(message.source - message.target) == 1
    assert ways["source"] == ways["target"]
    assert set(ways["source"].values()) <= {1}
    assert len(ways["source"]) == 2 * m * (p * v - 1)


def test_virtual_stages_go_round() -> None:
    """Chunk 0 of all stages, then chunk 1: as Megatron-LM numbers them."""
    order = [stage_and_chunk(virtual, stages=3) for virtual in range(6)]
    assert order == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [virtual_stage(*place, stages=3) for place in order] == list(range(6))
    round_again = received(Action("forward", 4, chunk=1), stage=0, stages=3, chunks=2)
    assert round_again == sent(Action("forward", 4, chunk=0), stage=2, stages=3, chunks=2)
    assert round_again is not None and round_again.source % 3 == 2
    assert sent(Action("weight", 0), 1, 3) is received(Action("update", 0), 1, 3) is None


def test_1f1b_alternates_after_its_warm_up() -> None:
    first, last = one_f_one_b(3, 5)[0], one_f_one_b(3, 5)[2]
    assert first == parse("F0 F1 F2 B0 F3 B1 F4 B2 B3 B4")
    assert last == parse("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4")


def test_interleaved_goes_through_the_chunks_in_groups() -> None:
    """As Megatron-LM's figure 4: p micro-batches on chunk 0, then the same on chunk 1."""
    actions = interleaved(4, 8, chunks=2)[0]
    forwards, backwards = (
        [(x.microbatch, x.chunk) for x in actions if x.phase == phase]
        for phase in ("forward", "backward")
    )
    assert forwards[:8] == [(k, c) for c in range(2) for k in range(4)]
    assert forwards[8:] == [(k, c) for c in range(2) for k in range(4, 8)]
    assert backwards == [(k, 1 - c) for k, c in forwards]


@given(cases(("pipedream",)))
@settings(max_examples=50, deadline=None)
def test_pipedream_is_some_updates_behind(case: Case) -> None:
    """On stage r, a forward knows of p-1-r updates less than on one device."""
    _, p, m, _ = case
    for r, actions in enumerate(pipedream(p, m)):
        known = 0
        for action in actions:
            if action.phase == "forward":
                assert known == max(0, action.microbatch - (p - 1 - r))
            known += action.phase == "update"


@pytest.mark.parametrize("name", SCHEDULES)
def test_wrong_sizes_are_named(name: str) -> None:
    chunks = 2 if name == "interleaved" else 1
    raises("stages=0: choose a whole number", schedule, name, 0, 3, chunks)
    raises("microbatches=-1", schedule, name, 3, -1, chunks)
    raises(r"microbatches=2.5: choose a whole number", schedule, name, 1, 2.5, chunks)


test_inadmissible_sizes_are_refused_with_the_rule = refusals(
    lambda sizes: schedule(*sizes),
    (("1f2b", 2, 2), f"'1f2b': choose one of {', '.join(SCHEDULES)}"),
    (("interleaved", 4, 6, 2), "microbatches=6 with 4 stages.*multiple of 4"),
    (("interleaved", 4, 8), "chunks=1: interleaved needs at least 2"),
    (("interleaved", 4, 8, 0), "chunks=0: interleaved needs at least 2"),
    (("1f1b", 4, 8, 2), "chunks=2: 1f1b has one chunk.*interleaved"),
    (("zb-h1", 4, 3), "microbatches=3 with 4 stages: zb-h1 needs 4 or more"),
    (("zb-h2", 4, 6), "microbatches=6 with 4 stages: zb-h2 needs 7 or more"),
)


def test_each_size_is_admitted_or_refused_as_the_closed_forms_do() -> None:
    costs = dict.fromkeys(("forward", "backward", "input", "weight"), 1)
    for name in ("interleaved", "zb-h1", "zb-h2"):
        chunks = 2 if name == "interleaved" else 1
        for p, m in product(range(1, 9), range(1, 17)):
            by_form = _refused(PROMISES[name].step, p, m, chunks, costs)
            assert _refused(schedule, name, p, m, chunks) == by_form


def _refused(function, *args) -> bool:
    try:
        function(*args)
    except ValueError:
        return True
    return False


SIZES = re.compile(r"(\d+) stages, (\d+) micro-batches(?:, (\d+) chunks)?")
FILES: dict[str, list[str]] = {}  # file -> the schedules in it, each under a table
for _name, _function in SCHEDULES.items():
    FILES.setdefault(_function.__module__.rpartition(".")[2], []).append(_name)


@pytest.mark.parametrize("file", FILES)
def test_the_table_in_a_file_is_what_the_code_makes(file: str) -> None:
    tables: list[tuple[list[int], list[str]]] = []
    for line in import_module(f"labkit.schedules.{file}").__doc__.splitlines():
        if sizes := SIZES.search(line):
            tables.append(([int(size) for size in sizes.groups() if size], []))
        elif re.match(r"\s+stage \d+ ", line):
            tables[-1][1].append(line.strip())
    for name, (sizes, lines) in zip(FILES[file], tables, strict=True):
        assert lines == show(schedule(name, *sizes)).splitlines()


@pytest.mark.parametrize(
    "module", [*(f"schedules.{file}" for file in (*FILES, "actions", "text")), "parallel.splitting"]
)
def test_the_examples_in_a_file_are_right(module: str) -> None:
    failed, attempted = doctest.testmod(import_module(f"labkit.{module}"))
    assert attempted > 0 and failed == 0
