"""Recorded runs: `labkit view` summarizes one, `labkit replay` replays it on other clusters."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from labkit.cli.terminal import app, console, save_picture
from labkit.foreign import check_output, check_picture, markup

RunFolder = Annotated[Path, Argument(metavar="RUN", help="Folder of a recorded run.")]


@app.command(
    epilog="Examples:  labkit view runs/gpt  ·  labkit view runs/gpt --chrome trace.json.gz, "
    "then open it at ui.perfetto.dev"
)
def view(
    folder: RunFolder,
    chrome: Annotated[
        Path | None,
        Option(help="Write a trace for Perfetto; .gz compresses it.", callback=check_output),
    ] = None,
    step: Annotated[int | None, Option(help="Draw the timeline of this step only.")] = None,
    open_: Annotated[bool, Option("--open", help="Show the pictures on screen.")] = False,
) -> None:
    """Summarize a recorded run, and draw its timeline and memory into its folder."""
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
        console.print(f"Picture: {markup(picture)}")
        if open_:
            typer.launch(str(picture))


@app.command(epilog="Examples:  labkit gather runs/gpt from-node-2/gpt from-node-3/gpt")
def gather(
    folder: RunFolder,
    parts: Annotated[
        list[Path], Argument(metavar="PART...", help="Folders that other hosts have recorded.")
    ],
) -> None:
    """Add other hosts' parts to a run that ended before labkit could bring them together."""
    from labkit.trace.folder import gather as add_parts

    for name in add_parts(folder, parts):
        console.print(f"added {name}")


@app.command(
    epilog="Examples:  labkit replay runs/compare/ddp  ·  "
    "labkit replay runs/compare/ddp --on selene --on internet  ·  "
    "labkit replay runs/gpt --clusters laptop.toml --measured"
)
def replay(
    folder: RunFolder,
    on: Annotated[
        list[str] | None,
        Option(help="A cluster; repeat the option for several; default: all known clusters."),
    ] = None,
    clusters: Annotated[
        Path | None,
        Option(help="A file with your own clusters, as `labkit doctor --cluster` writes it."),
    ] = None,
    measured: Annotated[
        bool,
        Option(
            "--measured", help="Keep measured compute times; take only the links from the cluster."
        ),
    ] = False,
    chrome: Annotated[
        Path | None,
        Option(help="Write a trace of one cluster for Perfetto.", callback=check_output),
    ] = None,
) -> None:
    """Replay a recorded run on other clusters: report the parts of a step, and draw a timeline.

    The run needs a detailed step (`record(detail_step=1)`, as in `labkit compare`); otherwise, use
    --measured.
    """
    from labkit import plot
    from labkit.clusters import known_clusters, read_clusters
    from labkit.replaying.summary import on_clusters, table
    from labkit.trace import read_run
    from labkit.trace.chrome import write_chrome

    trace = read_run(folder)
    own = read_clusters(clusters) if clusters else {}
    every = known_clusters() | own
    if unknown := [name for name in on or () if name not in every]:
        raise ValueError(f"no cluster {unknown[0]!r}; choose one of {', '.join(every)}")
    names = on or list(own if clusters else every)
    if chrome and len(names) != 1:
        raise ValueError("--chrome writes one replay; name its cluster with --on")
    chosen = {name: every[name] for name in names}
    replays = on_clusters(trace, chosen, "measured" if measured else "counted")
    if not any(result.replayed for result in replays):
        raise ValueError(replays[0].why_not)
    console.print(table(replays))
    for result in replays:
        if result.replayed is None:
            name, why_not = markup(result.name), markup(result.why_not)
            console.print(f"[yellow]not on {name}:[/] {why_not}", highlight=False)
            continue
        picture = folder / f"replay-{result.name.replace('/', '-')}.png"
        check_picture(picture)
        save_picture(plot.timeline(result.replayed), picture)
        if chrome:
            console.print(f"For ui.perfetto.dev: {markup(write_chrome(result.replayed, chrome))}")
