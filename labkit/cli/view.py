"""`labkit view`: what a recorded run did."""

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.terminal import console
from labkit.foreign import check_output, markup

EXAMPLES = (
    "Examples:  labkit view runs/mine  ·  labkit view runs/mine --chrome trace.json.gz, "
    "then open it at ui.perfetto.dev"
)


def view(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a recorded run.")],
    chrome: Annotated[
        Path | None,
        typer.Option(help="Write it for Perfetto; .gz packs it.", callback=check_output),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Draw the timeline of this step only.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the pictures on screen.")] = False,
) -> None:
    """Tell what a recorded run did, and draw its timeline and memory into its folder."""
    from labkit import view as viewing
    from labkit.trace import read_run
    from labkit.trace.chrome import write_chrome

    trace = read_run(folder)
    console.print(viewing.table(trace, str(folder)))
    for problem in trace.about.get("problems", ()):
        console.print(f"[red]damaged:[/] {markup(problem)}", highlight=False)
    if chrome:
        console.print(f"For ui.perfetto.dev: {markup(write_chrome(trace, chrome))}")
    for picture in viewing.draw(trace, folder, step):
        console.print(f"The picture: {markup(picture)}")
        if open_:
            typer.launch(str(picture))
