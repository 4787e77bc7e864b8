"""Values that lie about themselves, answers without an end, and skipped predictions are caught."""

import inspect
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import cloudpickle
import pytest
import torch

pytest.importorskip("jupytext", reason="the labs are built with jupytext")

import labkit.course.ranks as check_ranks
import liars
import test_checks
from editions import labs, solved, student
from labkit.course import EXERCISES, CheckFailed, equal, predict, run
from labkit.course.findings import difference, honest
from labkit.schedules.actions import Action
from liars import LIARS, LyingTensor, changed, wrong
from provoke import gone
from tables import cases, raises

cloudpickle.register_pickle_by_value(liars)


class Point(tuple):
    __slots__ = ()
    __eq__ = lambda *_: True  # noqa: E731
    __hash__ = tuple.__hash__


@cases(
    (LIARS[float](2.0), 1.5),
    (LIARS[int](3), 4),
    (LIARS[int](3), 4.0),
    (LIARS[str]("x"), "y"),
    (LIARS[tuple]((1, 2)), (1, 3)),
    (LIARS[list]([1, 2]), [1, 3]),
    (LIARS[dict]({"a": 1}), {"a": 2}),
    ([LIARS[float](2.0)], [1.5]),
    ({"a": (LIARS[int](1),)}, {"a": (2,)}),
    (torch.ones(2).as_subclass(LyingTensor), torch.zeros(2)),
    ([torch.ones(2).as_subclass(LyingTensor)], [torch.zeros(2)]),
    (torch.ones(()).as_subclass(LyingTensor), 2.0),
    (Point((1, 2)), (1, 3)),
)
def test_a_liar_is_compared_as_what_it_is(liar: Any, right: Any) -> None:
    assert difference(liar, right, 1e-6)
    raises("", equal, [right, liar], [right, right], error=CheckFailed)
    assert not difference(honest(right), right, 1e-6)


def test_honest_values_stay_the_same_objects() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    action = Action("forward", 0, 1)
    values = [1, 2.0, True, "x", None, (parameter, {"a": torch.ones(3).size()}), action]
    assert honest(values) is values
    found = honest([LIARS[int](7), action, Action("forward", LIARS[int](0), 1)])
    assert type(found[0]) is int and found[1] is action
    assert type(found[2]) is Action and type(found[2].microbatch) is int
    with_gradient = (parameter * 2).as_subclass(LyingTensor)
    assert type(honest(with_gradient)) is torch.Tensor and honest(with_gradient).requires_grad


def wrong_answer(solution: Any, lies: bool) -> Any:
    """Changes the result of a function, of a class's methods, or of a torch.autograd.Function's
    apply."""
    if not inspect.isclass(solution):
        return wrong(solution, lies)
    members = {
        name: wrong(method, lies)
        for name, method in vars(solution).items()
        if inspect.isfunction(method) and name != "__init__"
    }
    if issubclass(solution, torch.autograd.Function):

        def apply(cls: Any, *given: Any) -> Any:
            return changed(super(changed_class, cls).apply(*given), lies)

        members = {"apply": classmethod(apply)}
    changed_class: Any = type(solution.__name__, (solution,), members)
    return changed_class


FEW = ("02.crossover_bytes", "10.update", "17.global_norm", "00.average", "14.choose")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in FEW else pytest.mark.slow) for x in EXERCISES]
)
def test_no_exercise_falls_for_a_liar(name: str) -> None:
    """If a wrong value of an exact type fails, the same value of a lying type fails."""
    solution = test_checks.answer(name, "solved")

    def passes(lies: bool) -> bool:
        try:
            EXERCISES[name](wrong_answer(solution, lies))
        except CheckFailed:
            return False
        return True

    assert not passes(lies=True) or passes(lies=False)


def test_a_type_that_lies_passes_no_exercise_of_types() -> None:
    """10.runs_in expects torch's dtypes: a string or a number is wrong. And a lying number is not
    the global norm."""
    for name, value in (
        ("10.runs_in", "torch.float32"), ("10.runs_in", 1.0), ("10.runs_in", 1),
        ("17.global_norm", 99.0),
    ):  # fmt: skip
        lie = LIARS[type(value)](value)
        raises("", EXERCISES[name], lambda *_, lie=lie: lie, error=CheckFailed)


def endless(comm: Any, *_: Any) -> None:
    while comm.rank == 0:
        time.sleep(0.05)


def loops_too_long(call: Callable[..., Any], *args: Any) -> None:
    pids = run(3, lambda comm: os.getpid()).values
    says = "did not return within 1 s", "an endless loop"
    with patch.object(check_ranks, "LIMIT_S", 1.0):
        raises(says, call, *args, error=CheckFailed)
    assert gone(pids, 60), "the ranks that looped are left"
    assert run(3, lambda comm: comm.size).values == [3] * 3
    assert not [x for x in threading.enumerate() if isinstance(x, threading.Timer)]


@pytest.mark.slow
@pytest.mark.parametrize("on_a_thread", [False, True])
@pytest.mark.parametrize(
    "args", [(run, 3, endless), (check_ranks.watch, 3, "all_reduce", endless)], ids=["run", "watch"]
)
def test_a_loop_without_an_end_is_ended(args: Any, on_a_thread: bool) -> None:
    if on_a_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loops_too_long, *args).result(120)
    else:
        loops_too_long(*args)


def test_every_prediction_of_a_lab_is_there_before_it_is_made() -> None:
    """The first cell of the student edition makes an empty prediction for each name; a comparison
    with it fails with one sentence."""
    for lab in labs():
        cells = [cell.source for cell in student(lab).cells if cell.cell_type == "code"]
        names = re.findall(r"^(\w+) = predict\(", "\n".join(cells[1:]), re.MULTILINE)
        assert names or lab.name[:2] not in ("00", "04", "18")
        lines = [line for line in cells[0].splitlines() if "= predict()" in line]
        defined: dict[str, Any] = {"predict": predict}
        exec("\n".join(lines), defined)
        for name in names:
            nothing = "^nothing is predicted yet"
            failed = raises(nothing, defined[name].beside, anything=1, error=CheckFailed)
            assert "section 3" in failed.hint
            raises(nothing, defined[name].numbers.__getitem__, "anything", error=CheckFailed)


def test_the_solved_edition_is_as_its_source_says() -> None:
    """The line is only for students: solved cells keep their ids and outputs."""
    for lab in labs():
        first = next(cell for cell in solved(lab).cells if cell.cell_type == "code")
        text = (lab / "lab.py").read_text()
        assert first.source in text.replace("# %load_ext", "%load_ext")
