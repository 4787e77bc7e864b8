"""The labs' framework: predictions, and checks of a student's code on real ranks. A lab's notebook
calls a check as `check.average(average)`; exercise.py shows how to write a check.
"""

from labkit.course.exercise import EXERCISES, Exercise, Passed, Score, exercise, report
from labkit.course.findings import CheckFailed, equal, fail
from labkit.course.predictions import predict
from labkit.course.ranks import Ran, run
from labkit.course.source import show

__all__ = [
    "EXERCISES", "CheckFailed", "Exercise", "Passed", "Ran", "Score", "equal", "exercise", "fail",
    "predict", "report", "run", "show",
]  # fmt: skip
