"""The hang clinic: a broken program runs twice, through labkit and on plain torch.distributed; a
table shows what each of them says.

    def skips(comm):
        if comm.rank == 0:
            comm.all_reduce(torch.ones(4))

    clinic([skips], guesses={"skips": "hang"})

On plain torch a program ends in one of three ways:

    hang      a rank waited until the timeout
    crash     a rank was killed, or raised something else
    silent    all ranks returned, as if all were well
"""

import html
import io
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.comm import Comm
from labkit.course.findings import CheckFailed
from labkit.runtime.errors import RankError, ranks_text
from labkit.runtime.plain import Plain
from labkit.runtime.world import World

WAIT_S = 2.0  # how long a rank waits for another, in both runs
LONGEST = 160  # characters of torch's message
ENDINGS = ("hang", "crash", "silent")
Program = Callable[[Any], Any]


@dataclass(frozen=True)
class Finding:
    """The outcome of one program."""

    name: str
    ending: str  # on plain torch: one of ENDINGS
    torch_says: list[str]  # by rank; the last words of a rank that was killed
    labkit_says: str  # the error's text; empty without an error
    guess: str = ""

    @property
    def verdict(self) -> str:
        """The student's guess beside the outcome."""
        if self.guess in ("", self.ending):
            return f"✓ {self.ending}" if self.guess else self.ending
        return f"✗ {self.ending} (you: {self.guess})"


@dataclass(frozen=True)
class Clinic:
    """The findings, shown as one table."""

    findings: list[Finding]

    def __getitem__(self, name: str) -> Finding:
        return next(one for one in self.findings if one.name == name)

    def __repr__(self) -> str:
        parts = []
        for one in self.findings:
            lines = [f"{one.name}: {one.verdict}", *(f"  torch:  {x}" for x in one.torch_says)]
            parts += [*lines, *(f"  labkit: {x}" for x in one.labkit_says.splitlines()), ""]
        return "\n".join(parts).rstrip()

    def _repr_html_(self) -> str:
        style = "text-align: left; vertical-align: top; white-space: pre-wrap; font-size: 88%"
        body = ""
        for one in self.findings:
            cells = [one.name, one.verdict, "\n".join(one.torch_says), one.labkit_says or "nothing"]
            row = "".join(f'<td style="{style}">{html.escape(x)}</td>' for x in cells)
            body += f"<tr>{row}</tr>"
        titles = {"program": 11, "plain torch": 10, "its words": 36, "labkit's words": 43}
        head = "".join(
            f'<th style="text-align: left; width: {percent}%">{title}</th>'
            for title, percent in titles.items()
        )
        inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f'<table style="width: 100%">{inside}</table>'


def clinic(
    programs: Sequence[Program], guesses: Mapping[str, str] | None = None, size: int = 3
) -> Clinic:
    """Run each program, a function of a `Comm`, on `size` ranks, both ways, all at once.

    `guesses`: program's name -> "hang", "crash" or "silent", for each program; None asks for no
    guesses. Raises CheckFailed for a missing or unknown guess, or one without a program."""
    if guesses is not None:
        _validate_guesses([program.__name__ for program in programs], guesses)
    guesses = guesses or {}

    def examine(program: Program) -> Finding:
        name, (ending, torch_says) = program.__name__, through_torch(program, size)
        labkit_says = through_labkit(program, size)
        return Finding(name, ending, torch_says, labkit_says, guesses.get(name, ""))

    with redirect_stdout(io.StringIO()), ThreadPoolExecutor(len(programs) or 1) as together:
        return Clinic(list(together.map(examine, programs)))


def _validate_guesses(names: list[str], guesses: Mapping[str, Any]) -> None:
    endings, hint = " or ".join(ENDINGS), "What does plain torch do? Guess first, then look."
    if unknown := [name for name in guesses if name not in names]:
        raise CheckFailed(f"no program is called {unknown[0]!r}.", expected=", ".join(names))
    if missing := [name for name in names if guesses.get(name, ...) is ...]:
        sentence = f"no guess yet for {', '.join(missing)}."
        raise CheckFailed(sentence, endings, hint=f"{hint} A wrong guess costs nothing.")
    for name, guess in guesses.items():
        if guess not in ENDINGS:
            raise CheckFailed(f"your guess for {name} is {guess!r}.", endings, hint=hint)


def through_labkit(program: Program, size: int) -> str:
    """The text of labkit's error; empty if the program ran to its end."""
    with World(size, device="cpu", backend="gloo", timeout_s=WAIT_S) as world:
        try:
            world.run(_guarded, program)
        except RankError as error:
            lines = str(error).splitlines()
            return "\n".join(x for x in lines if "the next run" not in x)
    return ""


def through_torch(program: Program, size: int) -> tuple[str, list[str]]:
    """How the program ends on plain torch, and what torch says."""
    world = World(size, device="cpu", backend="gloo")
    with tempfile.TemporaryDirectory() as folder, world:
        try:
            says = world.run(_bare, program, folder)
        except RankError as error:
            died = str(error).splitlines()[0].split(";")[0]
            texts = [file.read_text(errors="replace") for file in sorted(Path(folder).iterdir())]
            # gloo's message about the exception that killed a rank
            last_words = re.findall(r"what\(\):\s*(.*)", "\n".join(texts))
            return "crash", [died, *map(_readable, last_words)]
    if any("Timed out" in one for one in says):
        ending = "hang"
    else:
        ending = "crash" if any("Error" in one for one in says) else "silent"
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(says):
        ranks_of.setdefault(text, []).append(rank)
    return ending, [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]


def _guarded(program: Program) -> None:
    """On a rank: the program through labkit's Comm."""
    program(Comm())


def _bare(program: Program, folder: str) -> str:
    """On a rank: the program on plain torch. What a dying process prints goes to a file."""
    comm = Plain(timeout_s=WAIT_S)
    kept = os.dup(2)
    with open(Path(folder) / f"rank{comm.rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        value = program(comm)
        return f"returns {value.tolist() if hasattr(value, 'tolist') else value!r}"
    except RuntimeError as error:
        return _readable(f"{type(error).__name__}: {error}")
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _readable(text: str) -> str:
    """The first line, without the folder that torch was built in, and not too long."""
    line = re.sub(r"\[(?:enforce fail at )?\S*/(\S+\.cc:\d+)\]", r"[\1]", text.splitlines()[0])
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
