"""Exercises: how to declare an exercise, what a pass shows, and a lab's points.

In `checks.py` in the lab's folder:

    @exercise(points=2)
    def average(student):
        '''Every rank gets the mean of all values, from one all-reduce.'''
        ran = run(4, lambda comm: student(comm, 10.0 * comm.rank))
        equal(ran.values, [15.0] * 4, hint="What does all_reduce do by default?")
        yield "the mean on 4 ranks"
        if max(ran.sent_bytes) > 8: fail(...)
        yield "8 bytes"

A check runs the student's function, and yields one line per proven property or fails with one
sentence. The check of an open exercise also yields a `Score`. The notebook calls the check:

    from labkit.labs.lab_00 import checks as check
    check.average(average)

`wrong_answers.py` in the same folder lists answers that the check must reject.
"""

import functools
import html
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from labkit.course.findings import CheckFailed, honest, kind, no_yield

GOOD_COLOR = "#009E73"  # green that color-blind readers can distinguish from an error's red

Student = Callable[..., Any]  # a function or class that a student writes
Check = Callable[[Any], "Iterable[str | Score]"]
EXERCISES: "dict[str, Exercise]" = {}  # by name, "00.average", in the order of declaration


@dataclass(frozen=True)
class Score:
    """The score of an open exercise; lower is better. `unit` is, for example, "bytes sent"."""

    value: int
    best: int
    unit: str

    def __str__(self) -> str:
        line = f"your score: {self.value:,} {self.unit}, the best known: {self.best:,}"
        return line + (" (you have beaten it: please share it)" if self.value < self.best else "")


@dataclass(frozen=True)
class Passed:
    """A pass, shown as a short box."""

    exercise: "Exercise"
    proven: list[str]
    score: Score | None = None

    def _lines(self) -> list[str]:
        points = self.exercise.points
        title = f"✓ {self.exercise.name} passed: {points} point{'s' * (points != 1)}"
        return [title, *self.proven, *([str(self.score)] if self.score else [])]

    def __repr__(self) -> str:
        return "\n  - ".join(self._lines())

    def _repr_html_(self) -> str:
        title, *lines = map(html.escape, self._lines())
        items = "".join(f"<li>{line}</li>" for line in lines)
        return (
            f'<div style="border-left: 4px solid {GOOD_COLOR}; padding: 2px 12px">'
            f'<b style="color: {GOOD_COLOR}">{title}</b>'
            f'<ul style="margin: 2px 0 2px 18px; padding: 0">{items}</ul></div>'
        )


class Exercise:
    """A check with a name and points. Calling an exercise raises CheckFailed for a wrong answer."""

    def __init__(self, name: str, points: int, check: Check, yields: bool = False):
        self.name, self.points, self._check, self._yields = name, points, check, yields
        self.__doc__ = check.__doc__
        self.passed: Passed | None = None  # the last pass of this session

    def __call__(self, student: Callable[..., Any]) -> Passed:
        findings: list[str | Score] = []
        try:
            if not callable(student):
                raise CheckFailed(
                    f"the check got {kind(student)}, but needs a function to call.",
                    hint="Pass the name of your function, without parentheses.",
                )
            if not self._yields:
                no_yield(student)
            answer = student
            if not (inspect.isclass(student) or inspect.isgeneratorfunction(student)):
                answer = functools.wraps(student)(lambda *a, **k: honest(student(*a, **k)))
            findings += self._check(answer)
        except CheckFailed as failed:
            failed.exercise = self.name
            if unpassed := self._built_on(student):
                more = f"First pass {' and '.join(unpassed)}, which your code calls."
                failed.hint = f"{failed.hint} {more}".strip()
            raise failed from None
        scores = [x for x in findings if isinstance(x, Score)]
        proven = [x for x in findings if not isinstance(x, Score)]
        self.passed = Passed(self, proven, scores[-1] if scores else None)
        return self.passed

    def _built_on(self, student: Any) -> list[str]:
        """Exercises of this lab that the student's function calls but that are not yet passed."""
        lab = self.name.partition(".")[0]
        called = getattr(getattr(student, "__code__", None), "co_names", ())
        open_names = [
            x.name.split(".") for x in EXERCISES.values() if x is not self and not x.passed
        ]
        return [name for number, name in open_names if number == lab and name in called]

    def __repr__(self) -> str:
        return f"{self.name}: {(self.__doc__ or '').splitlines()[0]}"


def exercise(points: int, yields: bool = False) -> Callable[[Check], Exercise]:
    """Declare an exercise, named after its check. `yields`: the answer is a generator function."""

    def declare(check: Check) -> Exercise:
        lab = re.search(r"lab_(\d\d)\.checks$", check.__module__)
        assert lab, f"{check.__module__}: exercises are declared in a lab's checks.py"
        name = f"{lab[1]}.{check.__name__}"
        EXERCISES[name] = Exercise(name, points, check, yields)
        return EXERCISES[name]

    return declare


class Report:
    """The exercises of a lab and the points earned in this session."""

    def __init__(self, lab: str):
        self.exercises = [x for name, x in EXERCISES.items() if name.startswith(f"{lab}.")]
        if not self.exercises:
            raise ValueError(f"report({lab!r}): no exercises; pass a lab's number: report('00')")

    def __repr__(self) -> str:
        width = max(len(x.name) for x in self.exercises)
        lines = []
        for x in self.exercises:
            state = f"✓ {x.points}" if x.passed else "  0"
            score = f"   {x.passed.score}" if x.passed and x.passed.score else ""
            lines.append(f"{x.name:<{width}}  {state} of {x.points}{score}")
        earned = sum(x.points for x in self.exercises if x.passed)
        lines.append(f"{'total':<{width}}    {earned} of {sum(x.points for x in self.exercises)}")
        return "\n".join(lines)


def report(lab: str) -> Report:
    """The points of lab `lab` ("00") so far. Raises ValueError for a lab without exercises."""
    return Report(lab)
