"""The hang clinic: a broken program runs twice, with labkit and with plain torch.distributed; a
table shows the errors side by side.

    def skips(comm):
        if comm.rank == 0:
            comm.all_reduce(torch.ones(4))

    clinic([skips], guesses={"skips": "hang"})

On plain torch a program ends in one of three ways:

    hang      a rank waited until the timeout
    crash     a rank was killed, or raised a different error
    silent    all ranks returned, and no error was raised
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

WAIT_S = 2.0  # how long a rank waits for a peer, in both runs
LONGEST = 160  # the table shows at most this many characters of torch's message
OUTCOMES = ("hang", "crash", "silent")
Program = Callable[[Any], Any]


@dataclass(frozen=True)
class Finding:
    """The outcome of one program."""

    name: str
    outcome: str  # on plain torch: one of OUTCOMES
    torch_messages: list[str]  # per rank; stderr if the rank was killed
    labkit_message: str  # the error's text; empty if there is none
    guess: str = ""

    @property
    def verdict(self) -> str:
        """The outcome, compared with the student's guess."""
        if self.guess in ("", self.outcome):
            return f"✓ {self.outcome}" if self.guess else self.outcome
        return f"✗ {self.outcome} (you: {self.guess})"


@dataclass(frozen=True)
class Clinic:
    """The findings, shown as one table."""

    findings: list[Finding]

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def __repr__(self) -> str:
        parts = []
        for finding in self.findings:
            lines = [
                f"{finding.name}: {finding.verdict}",
                *(f"  torch:  {x}" for x in finding.torch_messages),
            ]
            parts += [*lines, *(f"  labkit: {x}" for x in finding.labkit_message.splitlines()), ""]
        return "\n".join(parts).rstrip()

    def _repr_html_(self) -> str:
        style = "text-align: left; vertical-align: top; white-space: pre-wrap; font-size: 88%"
        body = ""
        for finding in self.findings:
            cells = [
                finding.name,
                finding.verdict,
                "\n".join(finding.torch_messages),
                finding.labkit_message or "nothing",
            ]
            row = "".join(f'<td style="{style}">{html.escape(x)}</td>' for x in cells)
            body += f"<tr>{row}</tr>"
        titles = {"program": 11, "plain torch": 10, "torch's message": 36, "labkit's message": 43}
        head = "".join(
            f'<th style="text-align: left; width: {percent}%">{title}</th>'
            for title, percent in titles.items()
        )
        inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f'<table style="width: 100%">{inside}</table>'


def clinic(
    programs: Sequence[Program], guesses: Mapping[str, str] | None = None, size: int = 3
) -> Clinic:
    """Run each program, a function of a `Comm`, on `size` ranks of labkit and of plain torch.

    `guesses` maps each program's name to "hang", "crash" or "silent"; with None, no guesses are
    required. Raises CheckFailed if a guess is missing or unknown, or names an unknown program."""
    if guesses is not None:
        _validate_guesses([program.__name__ for program in programs], guesses)
    guesses = guesses or {}

    def examine(program: Program) -> Finding:
        name, (outcome, torch_messages) = program.__name__, run_on_torch(program, size)
        labkit_message = run_on_labkit(program, size)
        return Finding(name, outcome, torch_messages, labkit_message, guesses.get(name, ""))

    with redirect_stdout(io.StringIO()), ThreadPoolExecutor(len(programs) or 1) as pool:
        return Clinic(list(pool.map(examine, programs)))


def _validate_guesses(names: list[str], guesses: Mapping[str, Any]) -> None:
    outcomes, hint = " or ".join(OUTCOMES), "What does plain torch do? Guess first, then look."
    if unknown := [name for name in guesses if name not in names]:
        raise CheckFailed(f"no program is called {unknown[0]!r}.", expected=", ".join(names))
    if missing := [name for name in names if guesses.get(name, ...) is ...]:
        sentence = f"no guess yet for {', '.join(missing)}."
        raise CheckFailed(sentence, outcomes, hint=f"{hint} A wrong guess costs nothing.")
    for name, guess in guesses.items():
        if guess not in OUTCOMES:
            raise CheckFailed(f"your guess for {name} is {guess!r}.", outcomes, hint=hint)


def run_on_labkit(program: Program, size: int) -> str:
    """The text of labkit's error; empty if the program completed."""
    with World(size, device="cpu", backend="gloo", timeout_s=WAIT_S) as world:
        try:
            world.run(_labkit_rank, program)
        except RankError as error:
            lines = str(error).splitlines()
            return "\n".join(x for x in lines if "the next run" not in x)
    return ""


def run_on_torch(program: Program, size: int) -> tuple[str, list[str]]:
    """The program's outcome on plain torch, and torch's messages."""
    world = World(size, device="cpu", backend="gloo")
    with tempfile.TemporaryDirectory() as folder, world:
        try:
            messages = world.run(_torch_rank, program, folder)
        except RankError as error:
            death = str(error).splitlines()[0].split(";")[0]
            texts = [file.read_text(errors="replace") for file in sorted(Path(folder).iterdir())]
            # gloo's message about the exception that killed a rank
            errors = re.findall(r"what\(\):\s*(.*)", "\n".join(texts))
            return "crash", [death, *map(_readable, errors)]
    if any("Timed out" in message for message in messages):
        outcome = "hang"
    else:
        outcome = "crash" if any("Error" in message for message in messages) else "silent"
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(messages):
        ranks_of.setdefault(text, []).append(rank)
    return outcome, [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]


def _labkit_rank(program: Program) -> None:
    """On a rank: run the program with labkit's Comm."""
    program(Comm())


def _torch_rank(program: Program, folder: str) -> str:
    """On a rank: run the program on plain torch; stderr goes to a file."""
    comm = Plain(timeout_s=WAIT_S)
    saved_stderr = os.dup(2)
    with open(Path(folder) / f"rank{comm.rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        value = program(comm)
        return f"returns {value.tolist() if hasattr(value, 'tolist') else value!r}"
    except RuntimeError as error:
        return _readable(f"{type(error).__name__}: {error}")
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


def _readable(text: str) -> str:
    """The first line of `text`, shortened, without torch's build folder."""
    line = re.sub(r"\[(?:enforce fail at )?\S*/(\S+\.cc:\d+)\]", r"[\1]", text.splitlines()[0])
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
