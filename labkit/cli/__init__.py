"""The command line: `labkit compare`, `run`, `doctor`, `view`, `replay`, `schedule`, `nccl-log`,
`plan` and `bench`. A command imports what it needs when it runs, so that `--help` is immediate.
"""

from labkit.cli import train, doctor, runs, plan, bench  # noqa: F401, I001 (the order of the help)
from labkit.cli.terminal import app


def main() -> None:
    """Entry of the command `labkit`."""
    app()
