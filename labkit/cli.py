"""The command line: `labkit compare`, `bench`, `doctor`, `nccl-log`, `plan`, `replay`, `run`,
`schedule`, `view`.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from labkit import __version__
from labkit.bench.command import bench
from labkit.planning.command import EXAMPLES, plan

app = typer.Typer(
    help="Distributed training you can read, run, check and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)
console = Console()

Ranks = Annotated[int, typer.Option(help="How many ranks.", min=1)]
Model = Annotated[str, typer.Option(help='Size of the GPT: "tiny", "1M" or "3.4M".')]
Steps = Annotated[int, typer.Option(help="How many steps to train.", min=1)]
Rows = Annotated[int, typer.Option(help="Sequences in the global batch; may be uneven.", min=1)]
Dtype = Annotated[str, typer.Option(help='"float64" proves equality, "float32" is usual.')]
Lr = Annotated[float, typer.Option(help="Learning rate of AdamW.")]
Seed = Annotated[int, typer.Option(help="Seed of model and data.", min=0)]
TextPath = Annotated[
    str | None, typer.Option("--text", help="A text file or folder; Python's own docs if absent.")
]


@app.command(
    epilog="Examples:  labkit compare  ·  labkit compare ddp --ranks 3 --rows 7  ·  "
    "labkit compare --text my_notes/ --dtype float32"
)
def compare(
    strategies: Annotated[
        list[str] | None, typer.Argument(help="Names, as `single` or `ddp`; if none: all families.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every strategy, not one a family.")] = False,
    ranks: Ranks = 4,
    model: Model = "1M",
    steps: Steps = 24,
    rows: Rows = 16,
    dtype: Dtype = "float64",
    lr: Lr = 3e-3,
    seed: Seed = 0,
    text: TextPath = None,
    out: Annotated[Path, typer.Option(help="Folder for the recorded runs and pictures.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Train a small GPT with each strategy on real ranks, and hold it against one process.

    Exits with status 1 when losses, weights, bytes sent or bytes held are not what they must be.
    """
    from labkit import compare as comparing
    from labkit.training import Task

    with _told():
        task = Task(model=model, steps=steps, rows=rows, dtype=dtype, lr=lr, seed=seed, text=text)
        results = comparing.compare(task, strategies, ranks, every, out=out)
    console.print(comparing.table(results, task))
    with console.status("drawing ..."):
        pictures = comparing.draw(results, out)
    console.print(f"The pictures: {', '.join(str(picture) for picture in pictures[:2])}")
    console.print(f"Each run: labkit view {out / results[-1].strategy}, and so on.")
    problems = [f"{one.strategy}: {problem}" for one in results for problem in one.problems]
    for problem in problems:
        console.print(f"[red]not equal[/] {problem}")
    if problems:
        raise typer.Exit(1)
    console.print("[green]All equal:[/] losses, weights, replicas, bytes sent and bytes held.")


@app.command(
    epilog="Examples:  labkit run ddp --ranks 4  ·  labkit run ddp --record runs/ddp  ·  "
    "torchrun --nproc-per-node 4 -m labkit run ddp"
)
def run(
    strategy: Annotated[str, typer.Argument(help="Name of a strategy, as `ddp`.")],
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Ranks to start; 4 if absent. Not under torchrun, which has started them.", min=1
        ),
    ] = None,
    model: Model = "1M",
    steps: Steps = 24,
    rows: Rows = 16,
    dtype: Dtype = "float32",
    lr: Lr = 3e-3,
    seed: Seed = 0,
    text: TextPath = None,
    record: Annotated[
        Path | None, typer.Option(help="Record the run into this folder, for `labkit view`.")
    ] = None,
) -> None:
    """Train with one strategy, on ranks of its own or on those that torchrun has started."""
    from labkit import recording
    from labkit.recipes import recipe
    from labkit.training import Task, train
    from labkit.world import World, attach

    with _told():
        chosen = recipe(strategy)
        task = Task(model=model, steps=steps, rows=rows, dtype=dtype, lr=lr, seed=seed, text=text)
        recorded: Callable[[], AbstractContextManager[object]] = nullcontext
        if record is not None:
            recorded = partial(recording.record, record, min(2, steps - 1), what=strategy)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if ranks is not None:
                raise ValueError("--ranks is torchrun's to say: --nproc-per-node")
            me = attach()
            with recorded():
                report = train(strategy, task, keep_weights=False)
            reports = me.comm.all_gather_object(report)
            if me.rank != 0:
                return
        else:
            if chosen.one_rank and ranks not in (None, 1):
                raise ValueError(f"{strategy} trains in one process; leave --ranks out")
            with World(1 if chosen.one_rank else ranks or 4) as world:
                console.print(f"{world.picked}")
                with recorded():
                    reports = world.run(train, strategy, task, keep_weights=False)
    first = reports[0]
    last_loss = sum(report.losses[-1] for report in reports) / len(reports)
    begin_loss = sum(report.losses[0] for report in reports) / len(reports)
    sent_bytes = sum(report.measured.bus_bytes for report in reports) / len(reports)
    on = f"{first.size} rank{'s' * (first.size > 1)}"
    console.print(
        f"{strategy} on {on}, {steps} steps: loss {begin_loss:.4f} -> "
        f"{last_loss:.4f}, {max(report.step_s for report in reports) * 1e3:.0f} ms a step, "
        f"{sent_bytes / 1e6:.2f} MB sent by a rank and step "
        f"(predicted {first.predicted.bus_bytes / 1e6:.2f})"
    )


@app.command(epilog="Examples:  labkit doctor  ·  labkit doctor --cluster laptop.toml --ranks 4")
def doctor(
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Instead, measure this machine for some ten seconds and write it to this file, "
            "as a cluster to replay runs on. Close other programs first.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="With --cluster: of so many ranks; 4 if absent.", min=1)
    ] = None,
) -> None:
    """Tell what this machine has, what a lab will pick, and what is wrong."""
    from labkit import doctor as examining

    if cluster is not None or ranks is not None:
        _measure_machine(cluster, ranks or 4)
        return
    with console.status("looking ..."):
        findings = examining.examine()
    console.print(examining.table(findings))
    for problem in findings.problems:
        console.print(f"[red]wrong:[/] {problem}")
    if findings.problems:
        raise typer.Exit(1)
    console.print("[green]Nothing is wrong.[/]")


def _measure_machine(path: Path | None, ranks: int) -> None:
    """Into a file of clusters."""
    from labkit import doctor as examining
    from labkit.bench.machine import measure_machine
    from labkit.clusters import write_clusters

    with _told():
        if path is None:
            raise ValueError("--ranks goes with --cluster FILE.toml, which is written")
        examining.check_cluster_file(path)
        measured = measure_machine(ranks)
        write_clusters(path, {measured.name: measured})
        console.print(examining.cluster_table(measured))
        console.print(
            f"To use it: from labkit import read_clusters; "
            f'read_clusters("{path.as_posix()}")["{measured.name}"]',
            markup=False,
        )


@app.command(
    epilog="Examples:  labkit view runs/mine  ·  labkit view runs/mine --chrome trace.json.gz, "
    "then open it at ui.perfetto.dev"
)
def view(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a recorded run.")],
    chrome: Annotated[
        Path | None, typer.Option(help="Write the trace for Perfetto; .gz packs it.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Draw the timeline of this step only.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the pictures on screen.")] = False,
) -> None:
    """Tell what a recorded run did, and draw its timeline and memory into its folder."""
    from labkit import view as viewing
    from labkit.trace import read_run
    from labkit.trace.chrome import write_chrome

    with _told():
        trace = read_run(folder)
        console.print(viewing.table(trace, str(folder)))
        for problem in trace.about.get("problems", ()):
            console.print(f"[red]damaged:[/] {problem}", highlight=False)
        if chrome:
            console.print(f"For ui.perfetto.dev: {write_chrome(trace, chrome)}")
        for picture in viewing.draw(trace, folder, step):
            console.print(f"The picture: {picture}")
            if open_:
                typer.launch(str(picture))


@app.command(
    epilog="Examples:  labkit replay runs/compare/ddp  ·  "
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
        Path | None, typer.Option(help="Write the replay (of one cluster) for Perfetto.")
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

    with _told():
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
                console.print(f"[yellow]not on {one.name}:[/] {one.why_not}", highlight=False)
            else:
                picture = folder / f"replay-{one.name}.png"
                plot.timeline(one.replayed).savefig(picture, dpi=120)
                console.print(f"The picture: {picture}")
                if chrome:
                    console.print(f"For ui.perfetto.dev: {write_chrome(one.replayed, chrome)}")


@app.command(
    epilog="Examples:  labkit schedule 1f1b  ·  labkit schedule interleaved --stages 4 "
    "--microbatches 8 --chunks 2  ·  labkit schedule zb-h1 --plot zb.png"
)
def schedule(
    name: Annotated[
        str,
        typer.Argument(help="naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2 or pipedream."),
    ],
    stages: Annotated[int, typer.Option(help="Stages of the pipeline, one a rank.", min=1)] = 4,
    microbatches: Annotated[int, typer.Option(help="Into which a batch is cut.", min=1)] = 8,
    chunks: Annotated[
        int | None, typer.Option(help="Pieces of the model a stage; 2 of interleaved.", min=1)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it over time, as PNG.")] = None,
) -> None:
    """Print a pipeline's schedule, its bubble, and what each stage holds at most."""
    from labkit import schedules
    from labkit.plot.pipeline_lanes import lanes_of

    with _told():
        found = schedules.schedule(
            name, stages, microbatches, chunks or (2 if name == "interleaved" else 1)
        )
        lanes = lanes_of(found, name)
        console.print(schedules.show(found), markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"A step is {lanes.step:g} forwards of a stage long, {lanes.bubble:.1%} of it idle (a "
            f"backward takes 2 forwards, or 1 for the input and 1 for the weights).\n"
            f"Micro-batches whose activations a stage holds at most: "
            f"{', '.join(f'{x:g}' for x in lanes.held)}.", highlight=False, soft_wrap=True,
        )  # fmt: skip
        if plot is not None:
            from labkit.plot import schedule as draw

            draw(found, name=name).savefig(plot, dpi=120)
            console.print(f"The picture: {plot}", soft_wrap=True)


@app.command(
    "nccl-log",
    epilog="Examples:  NCCL_DEBUG=INFO torchrun ... 2>&1 | tee nccl.log; labkit nccl-log nccl.log"
    "  ·  labkit nccl-log logs/*  (NCCL_DEBUG_FILE=logs/%h.%p: one of each process)"
    "  ·  labkit nccl-log --example two_nodes",
)
def nccl_log(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES",
            help="What a run with NCCL_DEBUG=INFO printed, of all ranks: one file or several that "
            "belong together; - is standard input.",
        ),
    ] = None,
    example: Annotated[
        str, typer.Option(help="Instead of files: one_node, two_nodes or sockets.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Where to draw to; if absent, FILE.png or nccl.png here.")
    ] = None,
) -> None:
    """Tell and draw what NCCL chose: rings, trees, channels, and which link carries what."""
    from labkit import plot
    from labkit.nccl_log import EXAMPLES, parse_nccl_log
    from labkit.nccl_log.summary import table
    from labkit.plot.nccl_logs import MOST_RANKS

    with _told():
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
        plot.nccl(log).savefig(picture, dpi=120)
        console.print(f"The picture: {picture}")


def _text_of(source: str) -> str:
    """What stands in the file, or comes from standard input for "-"."""
    if source == "-":
        return typer.get_text_stream("stdin", "utf-8", "replace").read()
    return Path(source).read_text(encoding="utf-8", errors="replace")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(f"labkit {__version__}")
        raise typer.Exit


class _told(ContextDecorator):
    """Errors that a user can mend are a sentence, not a traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        from labkit.world import RankError, RankInterrupt

        if isinstance(error, (KeyboardInterrupt, RankInterrupt)):
            console.print("interrupted")
            raise typer.Exit(130) from None
        if isinstance(error, (ValueError, OSError, RankError)):
            console.print(f"[red]labkit:[/] {error}", highlight=False)
            raise typer.Exit(2) from None


class _ToldGroup(TyperGroup):
    """Commands in a file of their own, with errors told as here."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            raise ValueError(f"no {self.name} {cmd_name!r}; there are {', '.join(self.commands)}")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        with _told():
            return super().invoke(ctx)


app.add_typer(bench, name="bench", cls=_ToldGroup)
app.command(epilog=EXAMPLES)(_told()(plan))


def main() -> None:
    """Entry of the command `labkit`."""
    app()


if __name__ == "__main__":
    main()
