"""`labkit bench`: each bench is a command with options of its own; without one, all run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from labkit.foreign import check_output, check_picture, markup

bench = typer.Typer(
    help="Measure labkit beside its peers, in one run. Close other programs first.",
    epilog="Examples:  labkit bench  ·  labkit bench data-parallel --only ddp  ·  "
    "labkit bench collectives --ops all_reduce --ranks 4",
    invoke_without_command=True, rich_markup_mode="rich",
)  # fmt: skip
console = Console()

Turns = Annotated[int, typer.Option(help="How often each is measured, in turns.", min=3)]
TransportName = Annotated[
    str | None,
    typer.Option("--transport", help="Of labkit's: shm, gloo; if absent, a World's pick."),
]
Save = Annotated[Path | None, typer.Option(help="Write all of it as JSON.", callback=check_output)]
Plot = Annotated[Path | None, typer.Option(help="Draw it, as PNG.", callback=check_picture)]


def _shown(name: str, measured: Callable[[], Any]) -> None:
    with console.status(f"measuring {name} ..."):
        table = measured()
    _print(table)


def _print(table: Table) -> None:
    """As wide as its columns ask for, whatever the terminal has: a number is never cut."""
    endless = console.options.update(max_width=1000)
    wanted = Measurement.get(console, endless, table).maximum
    Console(width=max(wanted, console.width)).print(table)


@bench.callback()
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        for one in bench.registered_commands:
            assert one.callback is not None
            if one.callback is not calibrate:  # it measures nothing, and takes minutes
                one.callback()


@bench.command()
def world() -> None:
    """How long until the ranks of a World are ready."""
    from labkit.bench import world as module

    _shown("world", lambda: module.table(module.bench_world()))


@bench.command()
def door() -> None:
    """What labkit's door adds to a call."""
    from labkit.bench import door as module

    _shown("door", lambda: module.table(module.bench_door()))


@bench.command("data-parallel")
def data_parallel(
    turns: Turns = 20,
    only: Annotated[
        str | None, typer.Option(help="ddp, zero-1, zero-2, zero-3: some of these, with commas.")
    ] = None,
    transport: TransportName = None,
) -> None:
    """A step of DDP, ZeRO-1, 2 and 3 against torch's."""
    from labkit.bench import data_parallel as module

    names = _words(only or "")
    module.contests(names)
    measure = partial(module.bench_data_parallel, names, turns=turns, transport=transport)
    _shown("data-parallel", lambda: module.table(measure()))


@bench.command(
    "tensor-parallel",
    epilog="Examples:  labkit bench tensor-parallel  ·  "
    "labkit bench tensor-parallel --ranks 4 --models 1M --turns 5 --save tensor.json",
)
def tensor_parallel(
    turns: Turns = 20,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,4",
    models: Annotated[str, typer.Option(help="1M, 3.4M: one or both.")] = "1M,3.4M",
    transport: TransportName = None,
    save: Save = None,
) -> None:
    """A step of tensor parallelism against torch's DTensor."""
    from labkit.bench import tensor_parallel as module

    with console.status("measuring tensor-parallel ..."):
        found = module.bench_tensor_parallel(_numbers(ranks), _words(models), turns, transport)
    _print(module.table(found))
    if save is not None:
        console.print(f"All that was measured: {markup(module.save(found, save))}", soft_wrap=True)


@bench.command(
    epilog="Examples:  labkit bench pipeline  ·  labkit bench pipeline --only 1f1b --ranks 4  ·  "
    "labkit bench pipeline --microbatches 16 --save pipeline.json",
)
def pipeline(
    turns: Turns = 20,
    only: Annotated[
        str | None,
        typer.Option(help="gpipe, 1f1b, interleaved, zb-h1: some of these, with commas."),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,4",
    models: Annotated[str, typer.Option(help="1M, 3.4M: one or both.")] = "1M,3.4M",
    microbatches: Annotated[int, typer.Option(help="So many of the 16 rows.", min=1)] = 8,
    transport: TransportName = None,
    save: Save = None,
) -> None:
    """A step of a pipeline against torch's by the same schedule, and the floor of both."""
    from labkit.bench import pipeline as module

    with console.status("measuring pipeline ..."):
        found = module.bench_pipeline(
            _words(only or ""), _numbers(ranks), _words(models), microbatches, turns, transport
        )
    _print(module.table(found))
    if save is not None:
        console.print(f"All that was measured: {markup(module.save(found, save))}", soft_wrap=True)


@bench.command(
    epilog="Examples:  labkit bench precision  ·  labkit bench precision --only recompute  ·  "
    "labkit bench precision --save precision.json"
)
def precision(
    turns: Turns = 20,
    only: Annotated[
        str | None,
        typer.Option(help="fp32, tf32, bf16, fp16, fp8, recompute: some of these, with commas."),
    ] = None,
    save: Save = None,
) -> None:
    """A step in each number format, and mixed precision and recompute against torch's."""
    from labkit.bench import precision as module
    from labkit.bench.precision_found import table

    names = _words(only or "")
    module.check_names(names)
    with console.status("measuring precision ..."):
        found = module.bench_precision(names, turns=turns)
    _print(table(found))
    if save is not None:
        console.print(f"All that was measured: {markup(found.save(save))}", soft_wrap=True)


@bench.command()
def recording(turns: Turns = 20) -> None:
    """What recording adds to a step."""
    from labkit.bench import recording as module

    _shown("recording", lambda: module.table(module.bench_recording(turns=turns)))


@bench.command()
def plot() -> None:
    """How long a slider waits for its picture."""
    from labkit.bench import plot as module

    _shown("plot", lambda: module.table(module.bench_plot()))


@bench.command(
    epilog="Examples:  labkit bench replay  ·  labkit bench replay --depth 96  ·  "
    "labkit bench replay --only scale"
)
def replay(
    turns: Turns = 10,
    depth: Annotated[
        int,
        typer.Option(
            help="Layers of the model of 175B that is recorded; 96 are all.", min=1, max=96
        ),
    ] = 96,
    only: Annotated[str | None, typer.Option(help="prediction or scale; both if absent.")] = None,
) -> None:
    """Steps over a modelled wire, predicted and measured; a dry run of 175B on 1,024 ranks."""
    from labkit.bench import dry_run as at_scale
    from labkit.bench import replay as module

    if only not in (None, "prediction", "scale"):
        raise typer.BadParameter(f"--only {only}: choose prediction or scale")
    if only != "scale":
        _shown("replay", lambda: module.table(module.bench_replay(turns=turns)))
    if only != "prediction":
        _shown("dry run", lambda: at_scale.table(at_scale.bench_dry_run(depth)))


@bench.command(epilog="Example:  labkit bench scale --no-others")
def scale(
    others: Annotated[
        bool, typer.Option(help="The ten models of 1.7B to 1008B of Megatron-LM's table, too.")
    ] = True,
) -> None:
    """A step of GPT-3 on 1,024 A100, recorded without data, and replayed."""
    from labkit.bench import scale as module

    _shown("scale", lambda: module.table(module.bench_scale(others)))


@bench.command(
    epilog="Examples:  labkit bench collectives --ops all_reduce --from 1K --to 16M  ·  "
    "labkit bench collectives --ops broadcast,reduce --algorithms tree,chain --ranks 4  ·  "
    "labkit bench collectives --algorithms default --ops there_and_back,all_reduce  ·  "
    "labkit bench collectives --save sweep.json --plot sweep.png  ·  "
    "labkit bench collectives --fit --table my_table.json"
)
def collectives(
    from_: Annotated[
        str, typer.Option("--from", help="Smallest size in bytes; K, M, G are powers of 1024.")
    ] = "4K",
    to: Annotated[str, typer.Option(help="Largest size.")] = "64M",
    factor: Annotated[int, typer.Option(help="Each size is so many times the one before.")] = 4,
    ops: Annotated[
        str | None,
        typer.Option(
            help="all_reduce, reduce_scatter, all_gather (these three if absent), broadcast, "
            "reduce, gather, scatter, all_to_all, ring_exchange, there_and_back (send and receive "
            "between neighbours): one or more, with commas."
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks; 2,4 if absent (2,3,4 with --fit).")
    ] = None,
    algorithms: Annotated[
        str | None, typer.Option(help="As default,ring,tree; all if absent.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, float64, float16, bfloat16, int32, int64 or uint8.")
    ] = "float32",
    redop: Annotated[str, typer.Option(help="sum, min, max or product.")] = "sum",
    turns: Annotated[int, typer.Option(help="How often each is measured, in turns.")] = 9,
    check: Annotated[bool, typer.Option(help="Count wrong elements.")] = True,
    transport: TransportName = None,
    save: Save = None,
    plot: Plot = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit alpha and beta; write a table of algorithms.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="Where --fit writes; else it tells.", callback=check_output)
    ] = None,
) -> None:
    """The table that nccl-tests prints, for labkit's collectives and the backend's own.

    Exits with status 1 where an element was wrong.
    """
    from labkit.bench import choices, fits, report, sweep
    from labkit.bench import collectives as module

    if fit and transport == "shm":
        raise ValueError("a table chooses for messages; --fit is for --transport gloo")
    if table is not None and not fit:
        raise ValueError("--table says where --fit writes; give both")
    if fit and dtype != "float32":
        raise ValueError(f"a table is fitted to float32, in which models train; not to {dtype}")
    if fit and (other := [op for op in _words(ops or "") if op not in choices.OPS]):
        raise ValueError(
            f"--fit with {other[0]}: a table chooses for {', '.join(choices.OPS)}; measure "
            f"{other[0]} in a run without --fit"
        )
    found = module.bench_collectives(
        sweep.sizes_between(sweep.parse_bytes(from_), sweep.parse_bytes(to), factor),
        (choices.OPS if fit else module.OPS) if ops is None else _words(ops),
        (choices.RANKS if fit else module.RANKS) if ranks is None else _numbers(ranks),
        None if algorithms is None else _words(algorithms), dtype, redop, turns, check,
        transport or ("gloo" if fit else None),
    )  # fmt: skip
    for shown in report.tables(found):
        _print(shown)
    if save:
        console.print(f"All that was measured: {markup(found.save(save))}", soft_wrap=True)
    if plot:
        from labkit.plot.bandwidths import bandwidth

        bandwidth(found).savefig(plot)
        console.print(f"The picture: {markup(plot)}", soft_wrap=True)
    if fit:
        fitted = fits.fit_sweep(found)
        _print(report.fit_table(fitted))
        if doubts := report.doubts(fitted):
            console.print(f"[yellow]poor fit:[/] {markup(doubts)}")
        path = choices.write_table(found, table or choices.user_table())
        console.print(
            f"The table of algorithms: {path}\nTo have it used, before ranks start:  "
            f"export LABKIT_TABLE={path.resolve()}\n"
            'It counts where messages go, World(n, transport="gloo"); ranks that share '
            'memory, as in World(n, transport="shm"), ask no table.', markup=False, soft_wrap=True,
        )  # fmt: skip
    if wrong := sum(point.wrong or 0 for point in found.points):
        console.print(f"[red]wrong:[/] {wrong} elements")
        raise typer.Exit(1)


@bench.command(
    epilog="Examples:  labkit bench transfers  ·  labkit bench transfers --mb 256 --to bf16  ·  "
    "labkit bench transfers --save transfers-h100.json --plot transfers.png"
)
def transfers(
    mb: Annotated[float, typer.Option(help="Megabytes (1e6 bytes) of fp32 that move.")] = 64.0,
    gbps: Annotated[
        float, typer.Option(help="Gigabits per second of the paced bus; 0 leaves it out.")
    ] = 16.0,
    turns: Turns = 9,
    to: Annotated[str, typer.Option(help="The dtype it is cast to: fp16 or bf16.")] = "fp16",
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Ways to move a tensor between memories: cast before or after, pinned or not, and so on."""
    from labkit.bench import transfers as module

    with console.status("measuring transfers ..."):
        found = module.bench_transfers(mb, gbps, turns, to)
    _print(module.table(found))
    if save:
        console.print(f"All that was measured: {markup(found.save(save))}", soft_wrap=True)
    if plot:
        from labkit.plot.memory_transfers import transfers as draw

        draw(found.measured, found.rates).savefig(plot)
        console.print(f"The picture: {markup(plot)}", soft_wrap=True)


@bench.command(
    epilog="Examples:  labkit bench calibrate --stored  ·  "
    "labkit bench calibrate --save calibration.json --plot calibration.png"
)
def calibrate(
    folder: Annotated[
        Path | None, typer.Argument(help="Of the published tables; if absent, labkit's copies.")
    ] = None,
    save: Save = None,
    plot: Plot = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Show what labkit brings along; fit nothing.")
    ] = False,
) -> None:
    """Fit the A100's constants to published step times, and tell every error. Minutes."""
    from labkit.bench import calibrate as module

    for said in module.run(folder, save, plot, stored):
        console.print(said, soft_wrap=True)


def _words(text: str) -> list[str]:
    """ "ring, tree" -> its words."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    if wrong := [word for word in _words(text) or [text] if not word.isdecimal()]:
        raise ValueError(f"{wrong[0]!r} is no number of ranks; write them as 2,4")
    return [int(word) for word in _words(text)]
