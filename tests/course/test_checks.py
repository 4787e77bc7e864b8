"""A lab's check fails the stub and each wrong answer, with its message, and passes the solution."""

import os
import re
import signal
import sys
import time
from importlib import import_module
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

pytest.importorskip("jupytext", reason="the labs are built with jupytext")

from answers import RIGHT, WRONG, Answer, Solution, answer, names_of
from command import python
from editions import labs, solved
from labkit.comm import CommError
from labkit.course import EXERCISES, CheckFailed, Exercise, Score, equal, fail, predict, report, run
from labkit.course.exercise import Passed
from labkit.labs.lab_01 import scenarios as lab_01
from labkit.labs.lab_16.wrong_answers import chunks_and_halves
from labkit.labs.lab_17.placement import BEST_PERCENT
from labkit.labs.lab_17.wrong_answers import best
from labkit.memory.peak import PeakMemory
from labkit.runtime.world import World
from tables import cases, raises

pytestmark = pytest.mark.slow
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not read all labs, too

LABS = {lab.name[:2]: lab for lab in labs()}

for lab in LABS:
    import_module(f"labkit.labs.lab_{lab}.checks")
    import_module(f"labkit.labs.lab_{lab}.wrong_answers")


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_is_recognised_as_the_stub(name: str):
    raises("you left the stub", EXERCISES[name], answer(name, "student"), error=CheckFailed)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name: str):
    passed = EXERCISES[name](answer(name, "solved"))
    assert passed.proven, "a check lists what it has proven"
    assert EXERCISES[name].passed is passed


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_has_a_notebook_and_two_wrong_answers_or_more(name: str) -> None:
    assert name.split(".")[0] in LABS
    count = sum(case.exercise == name for case in WRONG)
    assert count >= 2, f"{name} has {count} wrong answers: list more that it catches"


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_the_message_for_a_wrong_answer_says_what_is_wrong(case: Answer):
    failed = raises((case.says,), EXERCISES[case.exercise], case.make(), error=CheckFailed)
    assert "you left the stub" not in str(failed)


@pytest.mark.parametrize(("old", "count"), [("not there", 0), ("x", 3)])
def test_a_slip_must_fit_the_solution_once(old: str, count: int):
    says = f"{old!r} is {count} times in the solution of 00.average"
    raises(says, Solution("00.average").changed, f"{old} -> y", error=LookupError)


def test_a_slip_without_an_arrow_is_refused():
    raises("not `old -> new`: x.item()", Solution("00.average").changed, "x.item()")


def test_an_exercise_that_uses_another_says_so(monkeypatch: pytest.MonkeyPatch):
    """The message names the stub of the other exercise, and the hint says to begin there."""
    first, second = EXERCISES["02.my_all_gather"], EXERCISES["02.my_all_reduce"]
    solution, stub = answer(second.name, "solved"), answer(first.name, "student")
    monkeypatch.setattr(first, "passed", None)
    monkeypatch.setitem(solution.__globals__, "my_all_gather", stub)
    says = "you left the stub of my_all_gather", "First pass my_all_gather, which your code calls"
    raises(says, second, solution, error=CheckFailed)


def test_after_the_death_of_the_server_the_next_check_runs():
    """The ranks of all sizes die with it; later checks must run all the same."""
    for size in (2, 3):
        run(size, lambda comm: comm.rank)
    with pytest.raises(CheckFailed):
        run(2, lambda comm: comm.rank or os.kill(os.getppid(), signal.SIGKILL) or time.sleep(60))
    for size in (3, 2):
        assert run(size, lambda comm: comm.rank).values == list(range(size))


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_another_right_answer_passes(case: Answer):
    assert EXERCISES[case.exercise](case.make()).proven


def test_a_mean_may_be_a_number_of_numpy():
    def average(comm: Any, value: float) -> Any:
        x = torch.tensor(value)
        comm.all_reduce(x)
        return np.float32(x / comm.size)

    assert EXERCISES["00.average"](average).proven


def find_max(comm: Any, values: torch.Tensor) -> tuple[int, int]:
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    winner = torch.zeros(1, dtype=torch.uint8)
    if comm.rank == 0:
        maxima = [values.max().reshape(1)] + [torch.empty(1) for _ in others]
        for other in others:
            comm.recv(maxima[other], other)
        winner[0] = int(torch.cat(maxima).argmax())
        for other in others:
            comm.send(winner, other)
    else:
        comm.send(values.max().reshape(1), 0)
        comm.recv(winner, 0)
    index = values.argmax().to(torch.int16).reshape(1)
    if comm.rank == winner:
        for other in others:
            comm.send(index, other)
    else:
        comm.recv(index, int(winner))
    return int(winner), int(index)


def broadcast(comm: Any, x: torch.Tensor) -> None:
    """Three chunks in five steps: each step as (from, to, chunk)."""
    chunks = x.tensor_split(3)
    for messages in (
        [(0, 2, 0)],
        [(0, 4, 1), (2, 3, 0)],
        [(0, 3, 2), (3, 1, 0), (2, 4, 0), (4, 5, 1)],
        [(4, 3, 1), (5, 2, 1), (0, 4, 2), (2, 5, 0), (3, 1, 2)],
        [(4, 5, 2), (0, 1, 1), (1, 2, 2)],
    ):
        handles = [comm.isend(chunks[k], b) for a, b, k in messages if a == comm.rank]
        handles += [comm.irecv(chunks[k], a) for a, b, k in messages if b == comm.rank]
        for handle in handles:
            handle.wait()


ORDER = [
    (dp, pp, tp) for dp, pp in ((0, 0), (0, 1), (1, 0), (2, 0), (1, 1), (2, 1)) for tp in range(2)
]


@cases(
    ("00.find_max", find_max, None),
    ("01.place", lambda rank: ORDER[rank], lab_01.BEST),
    ("02.my_best_broadcast", broadcast, None),
    ("16.invent", chunks_and_halves, 37),
    ("17.choose", best, BEST_PERCENT),
)
def test_the_best_known_score_can_be_reached(name: str, reaches: Any, value: int | None):
    passed = EXERCISES[name](reaches)
    assert passed.score is not None and passed.score.value == passed.score.best
    assert value is None or passed.score.value == value
    assert name != "01.place" or "optimal: none of" in passed.proven[-1]


def test_the_recipes_of_lab_02_draw_what_the_solutions_do():
    prose = [cell.source for cell in solved(LABS["02"]).cells if cell.cell_type == "markdown"]
    recipes = re.findall(
        r"^```\n(plot\.movement.*?)```", "\n".join(prose), re.DOTALL | re.MULTILINE
    )
    assert len(recipes) == 2
    with World(4, backend="gloo") as world:
        for recipe in recipes:
            assert eval(recipe, names_of("02", "solved") | {"world": world}).axes


def message(play: Any, size: int = 2) -> str:
    return str(raises("", run, size, play, error=CheckFailed))


def divides(comm: Any) -> float:
    return 1 / comm.rank  # the line


def both_fail(comm: Any) -> None:
    if comm.rank == 0:
        raise ValueError("zero")  # line of rank 0
    raise ValueError("one")  # line of rank 1


def no_kernel(comm: Any) -> None:
    raise NotImplementedError("torch has no such kernel")


def fails_under_way(comm: Any) -> None:
    raise CommError("all_reduce failed: no such dtype")


@cases(
    (divides, r"rank 0 raised ZeroDivisionError: (float )?division by zero\.",
     "1 / comm.rank  # the line", "ranks.py"),
    (both_fail, r"rank 0 raised ValueError: zero\.", "line of rank 0", "line of rank 1"),
    (no_kernel, "ranks 0 and 1 raised NotImplementedError: torch has no", "", "your turn"),
    (fails_under_way, "ranks 0 and 1 raised CommError", 'CommError("all_reduce', "hang"),
)  # fmt: skip
def test_an_error_is_shown_with_the_students_own_line(
    play: Any, begins: str, shows: str, not_shown: str
) -> None:
    """The line of the rank that raised. NotImplementedError is not always the stub's, and a
    collective that fails is no hang."""
    text = message(play)
    assert re.match(begins, text)
    assert shows in text and not_shown not in text and "Each receive" not in text


def test_ranks_are_fresh_after_a_message_that_was_never_awaited():
    def forgets(comm: Any) -> None:
        comm.isend(torch.ones(3), 1 - comm.rank)

    assert "rank 0 returns before its send has completed" in message(forgets)

    def swaps(comm: Any) -> float:
        theirs = torch.zeros(3)
        handle = comm.isend(torch.full((3,), 5.0), 1 - comm.rank)
        comm.recv(theirs, 1 - comm.rank)
        handle.wait()
        return theirs[0].item()

    assert run(2, swaps).values == [5.0, 5.0]


def test_a_value_that_cannot_travel_is_named():
    assert "cannot be pickled" in message(lambda comm: (i for i in "ab"))


def test_a_run_counts_bytes_operations_and_memory():
    def play(comm: Any) -> None:
        x = torch.ones(250)  # 1,000 bytes
        y = x * 2
        del x
        y.add_(1)
        comm.all_reduce(y)

    ran = run(2, play)
    assert ran.ops == [["all_reduce"]] * 2
    assert ran.sent_bytes == ran.wire_bytes == [1000, 1000]
    cast = run(2, lambda comm: comm.broadcast(torch.ones(250)))
    assert cast.sent_bytes == [1000, 1000]
    assert cast.wire_bytes == [1000, 0], "rank 1 only receives"
    assert ran.peak_bytes == [2000, 2000]


def test_measuring_memory_does_not_load_the_compiler():
    """It would take seconds. (Only the first ranks have not loaded it yet.)"""
    code = (
        "import sys, torch\nfrom labkit.memory.peak import PeakMemory\n"
        "with PeakMemory():\n    torch.ones(3)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert python("-c", code).stdout.strip() == "False"


def test_memory_is_counted_by_storage_and_falls_when_tensors_go_or_are_resized() -> None:
    before = torch.zeros(50)
    with PeakMemory() as memory:
        before.add_(1)
        assert memory.peak_bytes == 0, "it was there before"
        x = torch.zeros(100)
        x.view(10, 10)[2:4].mul_(3)
        assert memory.held_bytes == memory.peak_bytes == 400
        del x
        assert (memory.held_bytes, memory.peak_bytes) == (0, 400)
    with PeakMemory() as memory:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        assert memory.held_bytes == 0
        x.untyped_storage().resize_(1000)
        torch.zeros(1)
        assert memory.peak_bytes == 1004


@cases(
    (None, 1.0, "rank 1 returned None"),
    (2.0, 1.5, "rank 1 returned 2.0; expected 1.5"),
    ("x", 1.5, "a str; expected a number"),
    (3, 4, "3; expected 4"),
    (torch.ones(2), 1.5, "a tensor of shape (2,); expected a number"),
    (1.5, torch.ones(2), "a float; expected a tensor of shape (2,)"),
    (torch.ones(3), torch.ones(2), "shape (3,); expected (2,)"),
    (torch.ones(2), torch.ones(2, dtype=torch.int64), "torch.float32; expected torch.int64"),
    (torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0]),
     "differs in 1 of 2 elements: element [1] is 5; expected 2"),
    (torch.tensor([float("nan")]), torch.tensor([0.0]), "element [0] is nan"),
    (float("nan"), 0.0, "nan; expected 0.0"),
    ((1, 2, 3), (1, 2), "a tuple of length 3; expected length 2"),
    ((1, 3), (1, 2), "(1, 3); expected (1, 2)"),
    ([0] * 30, [*[0] * 29, 1], "0; expected 1 (at index 29)"),
    (7, (7, 0), "an int; expected a tuple"),
    ("b", "a", "'b'; expected 'a'"),
)  # fmt: skip
def test_a_difference_is_reported(found: Any, right: Any, says: str):
    failed = raises((says,), equal, [right, found], [right, right], error=CheckFailed)
    assert "rank 1" in failed.sentence


@cases(
    (1.5 + 1e-9, 1.5),
    (torch.tensor([1.5]), 1.5),
    (2, 2.0),
    ([1, 2], (1, 2)),
    (None, None),
    (torch.tensor([1.0 + 1e-7]), torch.tensor([1.0])),
    (np.float32(1.5), 1.5),
    (np.array([1.5]), 1.5),
    ((np.int64(1), torch.tensor(2)), (1, 2)),
)
def test_equal_results_pass(found: Any, right: Any):
    equal([found], [right])


@pytest.mark.parametrize("found", [[1.0, 2.0], np.ones(2), "12"])
@pytest.mark.parametrize("right", [torch.ones(2), 1.5])
def test_a_hint_about_the_value_needs_the_right_type(found: Any, right: Any):
    failed = raises("", equal, [found], [right], hint="look there", error=CheckFailed)
    assert "look there" not in str(failed)


def passing(student: Any) -> Any:
    """A check."""
    student()
    yield "it ran"
    yield Score(48, 21, "bytes sent")


def test_a_pass_is_a_short_box_with_a_score_where_there_is_one() -> None:
    passed = Exercise("00.example", 2, passing)(lambda: None)
    assert repr(passed).splitlines() == [
        "✓ 00.example passed: 2 points",
        "  - it ran",
        "  - your score: 48 bytes sent, the best known: 21",
    ]
    assert "<li>it ran</li>" in passed._repr_html_()
    assert Passed(Exercise("00.x", 1, passing), ["a"]).score is None
    assert "you have beaten it" in str(Score(20, 21, "bytes sent"))
    assert "you have beaten it" not in str(Score(21, 21, "bytes sent"))


def test_a_failure_is_its_message_alone():
    def failing(student: Any) -> Any:
        yield "a beginning"
        fail("rank 1 sends 8 bytes.", expected="4 bytes", found="8", hint="send it once")

    failed = raises("", Exercise("00.example", 1, failing), lambda: None, error=CheckFailed)
    lines = failed._render_traceback_()
    assert "✗ 00.example: rank 1 sends 8 bytes." in lines[0]
    assert lines[1:] == ["  expected: 4 bytes", "  found:    8", "  hint:     send it once"]
    assert failed.__cause__ is None and failed.__suppress_context__


def test_a_call_instead_of_a_function_is_reported():
    says = "the check got a float, but needs a function to call"
    raises(says, Exercise("00.example", 1, passing), 3.5, error=CheckFailed)


def test_the_report_adds_up_what_has_passed(monkeypatch: pytest.MonkeyPatch):
    for name, points in (("77.first", 1), ("77.second", 3)):
        monkeypatch.setitem(EXERCISES, name, Exercise(name, points, passing))
    EXERCISES["77.second"](lambda: None)
    text = repr(report("77")).splitlines()
    assert text[0] == "77.first     0 of 1"
    assert text[1].startswith("77.second  ✓ 3 of 3   your score: 48")
    assert text[2] == "total        3 of 4"
    raises("no exercises; pass a lab's number", report, "78")


def test_a_prediction_stands_beside_what_was_measured():
    guess = predict(sent_bytes=4096, messages=2)
    assert repr(guess) == "predicted: sent (bytes) = 4,096, messages = 2"
    lines = repr(guess.beside(messages=3, sent_bytes=4096)).splitlines()
    assert lines[1].split() == ["sent", "(bytes)", "4,096", "4,096", "✓", "equal"]
    assert lines[2].endswith("✗ measured is 1.5 × the prediction")
    assert "✗" in repr(predict(x=0).beside(x=1))
    assert "<td" in guess.beside(messages=3, sent_bytes=4096)._repr_html_()
    beside = predict(sent_bytes=4096).beside("the formula's", sent_bytes=8192)
    head, row = repr(beside).splitlines()
    assert head.split() == ["predicted", "the", "formula's"]
    assert row.endswith("✗ the formula's is 2 × the prediction")
    assert "<th>the formula&#x27;s</th>" in beside._repr_html_()
    assert "measured" not in repr(beside) + beside._repr_html_()
    # A whole number has no decimals, however it was computed.
    guess = predict(sent_bytes=2 * 4096 / 2, s=0.5)
    assert repr(guess) == "predicted: sent (bytes) = 4,096, s = 0.5"
    assert "4,096.0" not in repr(guess.beside(sent_bytes=4096, s=float("inf")))


def test_a_prediction_must_be_made():
    raises("sent_bytes is not predicted yet", predict, sent_bytes=..., error=CheckFailed)
    says = "sent_bytes is a str, but a number is expected"
    raises(says, predict, sent_bytes="4 MB", error=CheckFailed)
    raises("use the same names", predict(sent_bytes=4).beside, messages=3)
    unnamed = raises("no name: 3, 2", predict, 3, 2, error=CheckFailed)
    assert "Name each prediction, as in" in unnamed.hint
    nothing = raises("nothing is predicted yet", predict().beside, sent_bytes=4, error=CheckFailed)
    assert "in section 3 first" in nothing.hint
