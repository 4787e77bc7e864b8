"""Answers to the exercises of the labs: wrong ones with words that the check must say, right ones.

In `wrong_answers.py` in the lab's folder:

    @wrong("00.average", "15.0 is right")
    def forgets_to_divide(comm, value): ...

Slips in the lab's solution are written as the text of the solution and the text of a student:

    Solution("00.average").slips('''
    forgets_to_divide: 15.0 is right
        x.item() / comm.size -> x.item()
    ''')

tests/course/test_checks.py runs them all. An exercise has at least two wrong answers. `right`
enters a right answer that differs from the solution, which must pass.
"""

import ast
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from textwrap import dedent, indent
from typing import Any


@dataclass(frozen=True)
class Answer:
    exercise: str  # "00.average"
    name: str
    make: Callable[[], Any]  # returns a function or class, like a student's
    says: str = ""  # words of the check's message; "" for a right answer

    def __str__(self) -> str:
        return f"{self.exercise}-{self.name}"


CHANGE = re.compile(r"^(\S(?:.|\n)*?) ->( .+|(?:\n .*)*)$", re.MULTILINE)
WRONG: list[Answer] = []
RIGHT: list[Answer] = []
Enter = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrong(exercise: str, says: str) -> Enter:
    """Enter a function or class as a wrong answer."""
    return partial(_enter, WRONG, exercise, says)


def right(exercise: str) -> Enter:
    """Enter a function or class as a right answer."""
    return partial(_enter, RIGHT, exercise, "")


def _enter(answers: list[Answer], exercise: str, says: str, answer: Any) -> Any:
    answers.append(Answer(exercise, answer.__name__, lambda: answer, says))
    return answer


@dataclass(frozen=True)
class Solution:
    """The solution of an exercise in the lab's source, to enter answers that differ in a few lines.

    For each answer, `slips` takes its name and words of the message (only the name, if it is
    right), and on the following lines, indented, its changes:

        old text -> new text

    Old text may have several lines, and must occur in the solution exactly once. New text may be
    empty, or follow on indented lines, which get the margin of the first line of the old text.
    A `return ...` without an arrow replaces the whole body. Lines that begin with # are comments.
    """

    exercise: str

    def slips(self, text: str) -> None:
        """Enter these wrong and right answers."""
        text = re.sub(r"^#.*\n", "", text.strip(), flags=re.MULTILINE)
        for entry in re.split(r"\n(?=\w)", text):
            head, _, slip = entry.partition("\n")
            name, _, says = head.partition(": ")
            assert name.isidentifier() and slip, f"{self.exercise}: no slip: {entry}"
            make = partial(self.changed, dedent(slip))
            (WRONG if says else RIGHT).append(Answer(self.exercise, name, make, says))

    def changed(self, slip: str) -> Any:
        """The solution with the changes of an answer."""
        text = self._text()
        if slip.startswith("return ") and " ->" not in slip:
            (function,) = ast.parse(text).body
            assert isinstance(function, ast.FunctionDef), f"{self.exercise} is no function"
            function.body = ast.parse(slip).body
            return self._defined(ast.unparse(function))
        if rest := CHANGE.sub("", slip).strip():
            raise ValueError(f"{self.exercise}: not `old -> new`: {rest}")
        for old, new in CHANGE.findall(slip):
            lines = [re.escape(line.strip()) for line in old.splitlines()]
            places = [place.span() for place in re.finditer(r"\n\s*".join(lines), text)]
            if (count := len(places)) != 1:
                raise LookupError(f"{old!r} is {count} times in the solution of {self.exercise}")
            start, end = places[0]
            line = text[:start].rpartition("\n")[2]
            margin = " " * (len(line) - len(line.lstrip()))
            text = text[:start] + indent(dedent(new).strip(), margin).lstrip() + text[end:]
        return self._defined(text)

    def _text(self) -> str:
        start = re.compile(rf"^(?:def|class) {argument_name(self.exercise)}\b", re.MULTILINE)
        (text,) = (x for x in cells_of(self.exercise[:2], "solved") if start.search(x))
        return text

    def _defined(self, text: str) -> Any:
        names = dict(names_of(self.exercise[:2], "solved"))
        define(text, f"<{self.exercise}, changed>", names)
        return names[argument_name(self.exercise)]


# ---- the arguments of checks in a notebook


def answer(exercise: str, edition: str) -> Any:
    """The argument of the check in the notebook: `average` of `check.average(average)`."""
    return names_of(exercise[:2], edition)[argument_name(exercise)]


def argument_name(exercise: str) -> str:
    """The name of the argument of a check."""
    from editions import checked

    lab, name = exercise.split(".")
    (call,) = (text for text in cells_of(lab, "solved") if checked(text) == name)
    return next(re.finditer(rf"^check\.{name}\((\w+)\)", call, re.MULTILINE))[1]


@cache
def names_of(lab: str, edition: str) -> dict[str, Any]:
    """The functions, classes, imports and constants of an edition, without running its cells."""
    names: dict[str, Any] = {"__name__": f"{edition} edition of lab {lab}"}
    for number, text in enumerate(cells_of(lab, edition)):
        define(text, f"<{edition} {lab}, cell {number}>", names)
    return names


@cache
def cells_of(lab: str, edition: str) -> list[str]:
    """The code cells of the "student" or "solved" edition, without magics."""
    import editions

    (folder,) = (folder for folder in editions.labs() if folder.name.startswith(lab))
    cells = [cell for cell in getattr(editions, edition)(folder).cells if cell.cell_type == "code"]
    texts = [cell.source for cell in cells if not cell.source.startswith("%%")]
    return [re.sub(r"^[%!].*", "pass", text, flags=re.MULTILINE) for text in texts]


def define(text: str, file: str, names: dict[str, Any]) -> None:
    """Add the imports, definitions and constants (`SIZE = 4`) of a cell to `names`."""
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    tree = ast.parse(text)
    tree.body = [
        x
        for x in tree.body
        if isinstance(x, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))
        or (isinstance(x, ast.Assign) and isinstance(x.value, ast.Constant))
    ]
    exec(compile(tree, file, "exec"), names)
