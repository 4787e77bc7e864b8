"""What runs did: `labkit view` of a recorded one, `labkit replay` of it on other clusters, and
`labkit nccl-log` of what NCCL chose in one."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from labkit.cli.terminal import ClusterFile, RunFolder, app, console, save_picture
from labkit.foreign import check_output, check_picture, markup, read_file

Chrome = Annotated[
    Path | None, Option(help="Write it for Perfetto; .gz packs it.", callback=check_output)
]


@app.command(
    epilog="Examples:  labkit view runs/mine  ·  labkit view runs/mine --chrome trace.json.gz, "
    "then open it at ui.perfetto.dev"
)
def view(
    folder: RunFolder,
    chrome: Chrome = None,
    step: Annotated[int | None, Option(help="Draw the timeline of this step only.")] = None,
    open_: Annotated[bool, Option("--open", help="Show the pictures on screen.")] = False,
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


@app.command(
    epilog="Examples:  labkit replay runs/compare/ddp  ·  "
    "labkit replay runs/compare/ddp --on selene --on internet  ·  "
    "labkit replay runs/mine --clusters laptop.toml --measured"
)
def replay(
    folder: RunFolder,
    on: Annotated[
        list[str] | None, Option(help="A cluster; again for another; all if absent.")
    ] = None,
    clusters: ClusterFile = None,
    measured: Annotated[
        bool, Option("--measured", help="Only the wires are the cluster's.")
    ] = False,
    chrome: Chrome = None,
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
    own = read_clusters(clusters) if clusters else {}
    every = known_clusters() | own
    if unknown := [name for name in on or () if name not in every]:
        raise ValueError(f"no cluster {unknown[0]!r}; there are {', '.join(every)}")
    chosen = {name: every[name] for name in on or (own if clusters else every)}
    if chrome and len(chosen) != 1:
        raise ValueError("--chrome writes one replay: name its cluster by --on")
    replays = on_clusters(trace, chosen, "measured" if measured else "counted")
    if not any(one.replayed for one in replays):
        raise ValueError(replays[0].why_not)
    console.print(table(replays))
    for one in replays:
        if one.replayed is None:
            name, why_not = markup(one.name), markup(one.why_not)
            console.print(f"[yellow]not on {name}:[/] {why_not}", highlight=False)
            continue
        picture = folder / f"replay-{one.name.replace('/', '-')}.png"
        check_picture(picture)
        save_picture(plot.timeline(one.replayed), picture)
        if chrome:
            console.print(f"For ui.perfetto.dev: {markup(write_chrome(one.replayed, chrome))}")


@app.command(
    "nccl-log",
    epilog="Examples:  NCCL_DEBUG=INFO torchrun ... 2>&1 | tee nccl.log; labkit nccl-log nccl.log"
    "  ·  labkit nccl-log logs/*  (NCCL_DEBUG_FILE=logs/%h.%p: one of each process)"
    "  ·  labkit nccl-log --example two_nodes",
)
def nccl_log(
    files: Annotated[
        list[str] | None,
        Argument(
            metavar="FILES",
            help="What a run with NCCL_DEBUG=INFO printed, of all ranks: one file or several that "
            "belong together; - is standard input.",
        ),
    ] = None,
    example: Annotated[str, Option(help="Instead of files: one_node, two_nodes or sockets.")] = "",
    out: Annotated[Path | None, Option(help="FILE.png if absent.", callback=check_picture)] = None,
) -> None:
    """Tell and draw what NCCL chose: rings, trees, channels, and which link carries what."""
    from labkit import plot
    from labkit.plot.nccl_logs import MOST_RANKS
    from labkit.trace.nccl_log import EXAMPLES, parse_nccl_log
    from labkit.trace.nccl_log.summary import table

    if bool(files) == bool(example):
        raise ValueError("give a file with a log, or --example two_nodes")
    if example and example not in EXAMPLES:
        raise ValueError(f"no example {example!r}; there are {', '.join(EXAMPLES)}")
    sources = files or [str(EXAMPLES[example])]
    log = parse_nccl_log("\n".join(_text_of(source) for source in sources))
    name, stem = f"{len(sources)} logs", "nccl"
    if sources == ["-"]:
        name = "standard input"
    elif len(sources) == 1:
        name, stem = Path(sources[0]).name, Path(sources[0]).stem
    console.print(table(log, f"{example}, composed for teaching" if example else name))
    if log.main.size > MOST_RANKS:
        console.print(f"No picture: {log.main.size} ranks; it shows at most {MOST_RANKS}.")
        return
    picture = out or Path(f"{stem}.png")
    check_picture(picture)
    save_picture(plot.nccl(log), picture)


def _text_of(source: str) -> str:
    """What is in the file, or comes from standard input for "-"."""
    if source == "-":
        return typer.get_text_stream("stdin", "utf-8", "replace").read()
    return read_file(source).decode(errors="replace")
