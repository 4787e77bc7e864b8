"""The command line: `labkit compare`, `bench`, `doctor`, `nccl-log`, `plan`, `replay`, `run`,
`schedule`, `view`, each in a file of its own with its examples.
"""

from typing import Annotated

import typer

from labkit import __version__
from labkit.cli import bench, compare, doctor, nccl_log, plan, replay, run, schedule, view
from labkit.cli.terminal import ErrorGroup, console

app = typer.Typer(
    cls=ErrorGroup,
    help="Distributed training you can read, run, check and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(f"labkit {__version__}")
        raise typer.Exit


app.command(epilog=compare.EXAMPLES)(compare.compare)
app.command(epilog=run.EXAMPLES)(run.run)
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(epilog=view.EXAMPLES)(view.view)
app.command(epilog=replay.EXAMPLES)(replay.replay)
app.command(epilog=schedule.EXAMPLES)(schedule.schedule)
app.command("nccl-log", epilog=nccl_log.EXAMPLES)(nccl_log.nccl_log)
app.command(epilog=plan.EXAMPLES)(plan.plan)
app.add_typer(bench.bench, name="bench", cls=ErrorGroup)


def main() -> None:
    """Entry of the command `labkit`."""
    app()
