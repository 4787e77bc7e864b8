"""Checks of a student's code, on real ranks: numbers, bytes and memory, told in words.

A lab's checks stand in `labkit/check/lab_NN.py`; its notebook calls one as
`check.average(average)`. How to write one: `labkit/check/exercise.py`.
"""

from labkit.check.exercise import EXERCISES, Exercise, Passed, Score, exercise, report
from labkit.check.findings import CheckFailed, equal, fail
from labkit.check.predict import predict
from labkit.check.ranks import Ran, run

__all__ = [
    "EXERCISES",
    "CheckFailed",
    "Exercise",
    "Passed",
    "Ran",
    "Score",
    "equal",
    "exercise",
    "fail",
    "predict",
    "report",
    "run",
]
