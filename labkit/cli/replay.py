"""`labkit replay`: a recorded run on other clusters."""

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.terminal import console
from labkit.foreign import check_output, check_picture, markup

EXAMPLES = (
    "Examples:  labkit replay runs/compare/ddp  ·  "
    "labkit replay runs/compare/ddp --on selene --on internet  ·  "
    "labkit replay runs/mine --clusters laptop.toml --measured"
)


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a recorded run.")],
    on: Annotated[
        list[str] | None,
        typer.Option(help="A cluster, and once more for another; if none, all that are known."),
    ] = None,
    clusters: Annotated[
        Path | None,
        typer.Option(help="A file of clusters of your own, as `labkit doctor --cluster` writes."),
    ] = None,
    measured: Annotated[
        bool,
        typer.Option("--measured", help="Computing as it was; only the wires are the cluster's."),
    ] = False,
    chrome: Annotated[
        Path | None,
        typer.Option(help="Write it for Perfetto, on one cluster.", callback=check_output),
    ] = None,
) -> None:
    """What a recorded run would do on other clusters: the split of its step, and its timeline.

    The run must have a step in detail (`record(detail_step=1)`; `labkit compare` has), or use
    --measured.
    """
    from labkit import plot
    from labkit.clusters import known_clusters, read_clusters
    from labkit.replaying.summary import on_clusters, table
    from labkit.trace import read_run
    from labkit.trace.chrome import write_chrome

    trace = read_run(folder)
    every = known_clusters() | (read_clusters(clusters) if clusters else {})
    if unknown := [name for name in on or () if name not in every]:
        raise ValueError(f"no cluster {unknown[0]!r}; there are {', '.join(every)}")
    names = on or list(read_clusters(clusters) if clusters else every)
    if chrome and len(names) != 1:
        raise ValueError("--chrome writes one replay: name its cluster by --on")
    found = on_clusters(
        trace, {name: every[name] for name in names}, "measured" if measured else "counted"
    )
    if not any(one.replayed for one in found):
        raise ValueError(found[0].why_not)
    console.print(table(found))
    for one in found:
        if one.replayed is None:
            name, why_not = markup(one.name), markup(one.why_not)
            console.print(f"[yellow]not on {name}:[/] {why_not}", highlight=False)
        else:
            picture = folder / f"replay-{one.name.replace('/', '-')}.png"
            check_picture(picture)
            plot.timeline(one.replayed).savefig(picture, dpi=120)
            console.print(f"The picture: {markup(picture)}")
            if chrome:
                console.print(f"For ui.perfetto.dev: {markup(write_chrome(one.replayed, chrome))}")
