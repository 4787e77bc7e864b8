"""labkit's commands as a user types them, and programs in a Python of their own."""

import os
import subprocess
import sys
from typing import Any

from typer.testing import CliRunner

from labkit.cli import app
from places import ROOT


def command(
    line: str,
    status: int = 0,
    input: str | bytes | None = None,
    env: dict[str, str | None] | None = None,
) -> str:
    """All words that `labkit LINE` prints, in one line; it must end with this status."""
    done = CliRunner().invoke(app, line.split(), input=input, env=env)
    assert done.exit_code == status, (done.output, done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return " ".join(done.output.replace("│", " ").split())  # typer's own stand in a box


def run(
    *words: object, status: int | None = 0, timeout: float = 100, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A program, run to its end; it must end with this status, unless None."""
    words = tuple(map(str, words))
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)
    assert status in (done.returncode, None), done.stdout[-6000:] + done.stderr[-3000:]
    return done


def python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`run` of a Python that finds labkit."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
    return run(sys.executable, *words, env=env, **options)
