"""Wrong answers to the exercises of the labs, each with words that its check must say.

In `wrong_answers.py` in the lab's folder:

    @wrong("00.average", "15.0 is right")
    def forgets_to_divide(comm, value): ...

tests/course/test_checks.py runs them all. An exercise has at least two. `@right("00.average")`
enters another right answer than the solution, which must pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wrong:
    exercise: str  # "00.average"
    says: str  # in the message of the check
    answer: Callable[..., Any]


WRONG: list[Wrong] = []
RIGHT: list[tuple[str, Callable[..., Any]]] = []  # the exercise, an answer


def wrong(exercise: str, says: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function or class as a wrong answer."""

    def enter(answer: Callable[..., Any]) -> Callable[..., Any]:
        WRONG.append(Wrong(exercise, says, answer))
        return answer

    return enter


def right(exercise: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function or class as a right answer."""

    def enter(answer: Callable[..., Any]) -> Callable[..., Any]:
        RIGHT.append((exercise, answer))
        return answer

    return enter
