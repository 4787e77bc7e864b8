"""`labkit bench`: one command per benchmark. Without a command, all benchmarks run."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from labkit.cli.terminal import (
    ErrorGroup,
    Plot,
    app,
    console,
    print_table,
    save_picture,
    split_numbers,
    split_words,
)
from labkit.foreign import check_output, markup

bench = typer.Typer(
    help="Benchmark labkit and its counterparts in the same run. Close other programs first.",
    epilog="Examples:  labkit bench  ·  labkit bench data-parallel --only ddp  ·  "
    "labkit bench collectives --ops all_reduce --ranks 4",
    invoke_without_command=True, rich_markup_mode="rich",
)  # fmt: skip
app.add_typer(bench, name="bench", cls=ErrorGroup)

Turns = Annotated[int, Option(help="Turns: how many times each case is timed.", min=3)]
Ranks = Annotated[str, Option(help="Numbers of ranks, separated by commas.")]
Models = Annotated[str, Option(help="1M, 3.4M or both, separated by commas.")]
TransportName = Annotated[
    str | None,
    Option("--transport", help="labkit's transport: shm or gloo; default: chosen by World."),
]
Save = Annotated[Path | None, Option(help="Write all results as JSON.", callback=check_output)]


@bench.callback()
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        for command in bench.registered_commands:
            assert command.callback is not None
            command.callback()


@bench.command("data-parallel")
def data_parallel(
    turns: Turns = 20,
    only: Annotated[
        str | None, Option(help="Any of ddp, zero-1, zero-2, zero-3, separated by commas.")
    ] = None,
    ranks: Ranks = "2,4",
    transport: TransportName = None,
    save: Save = None,
) -> None:
    """Time a step of DDP and of ZeRO stages 1, 2 and 3, and of torch's counterparts."""
    sizes = split_numbers("ranks", ranks)
    _measure("data_parallel", save, split_words(only), sizes, turns=turns, transport=transport)


@bench.command(
    "tensor-parallel",
    epilog="Examples:  labkit bench tensor-parallel  ·  "
    "labkit bench tensor-parallel --ranks 4 --models 1M --turns 5 --save tensor.json",
)
def tensor_parallel(
    turns: Turns = 20,
    ranks: Ranks = "2,4",
    models: Models = "1M,3.4M",
    transport: TransportName = None,
    save: Save = None,
) -> None:
    """Time a step of tensor parallelism, and of torch's DTensor."""
    sizes, names = split_numbers("ranks", ranks), split_words(models)
    _measure("tensor_parallel", save, sizes, names, turns, transport)


@bench.command(
    epilog="Examples:  labkit bench pipeline  ·  labkit bench pipeline --only 1f1b --ranks 4  ·  "
    "labkit bench pipeline --microbatches 16 --save pipeline.json",
)
def pipeline(
    turns: Turns = 20,
    only: Annotated[
        str | None, Option(help="Any of gpipe, 1f1b, interleaved, zb-h1, separated by commas.")
    ] = None,
    ranks: Ranks = "2,4",
    models: Models = "1M,3.4M",
    microbatches: Annotated[int, Option(help="Micro-batches per batch of 16 rows.", min=1)] = 8,
    transport: TransportName = None,
    save: Save = None,
) -> None:
    """Time a step of labkit's and torch's pipelines by schedule, and compute a lower bound."""
    sizes, names = split_numbers("ranks", ranks), split_words(models)
    _measure("pipeline", save, split_words(only), sizes, names, microbatches, turns, transport)


@bench.command(
    epilog="Examples:  labkit bench precision  ·  labkit bench precision --only recompute  ·  "
    "labkit bench precision --save precision.json"
)
def precision(
    turns: Turns = 20,
    only: Annotated[
        str | None,
        Option(help="Any of fp32, tf32, bf16, fp16, fp8, recompute, separated by commas."),
    ] = None,
    save: Save = None,
) -> None:
    """Time a step in each number format, and with torch's mixed precision and recomputation."""
    _measure("precision", save, split_words(only), turns=turns)


@bench.command()
def attention(turns: Turns = 9, save: Save = None) -> None:
    """Time attention by sequence length: plain, labkit's flash attention and torch's."""
    _measure("attention", save, turns)


@bench.command()
def replay(turns: Turns = 10) -> None:
    """Compare DDP step times over a paced link, as predicted by a replay and as measured."""
    _measure("replay", None, turns=turns)


@bench.command(
    epilog="Examples:  labkit bench collectives --ops all_reduce --from 1K --to 16M  ·  "
    "labkit bench collectives --ops broadcast,reduce --algorithms tree,chain --ranks 4  ·  "
    "labkit bench collectives --algorithms default --ops there_and_back,all_reduce  ·  "
    "labkit bench collectives --save sweep.json --plot sweep.png  ·  "
    "labkit bench collectives --fit --table my_table.json"
)
def collectives(
    from_: Annotated[
        str, Option("--from", help="Smallest size in bytes; K, M, G are powers of 1024.")
    ] = "4K",
    to: Annotated[str, Option(help="Largest size.")] = "64M",
    factor: Annotated[int, Option(help="Ratio of each size to the previous one.")] = 4,
    ops: Annotated[
        str | None,
        Option(
            help="Any of all_reduce, reduce_scatter, all_gather (default: these three), broadcast, "
            "reduce, gather, scatter, all_to_all, ring_exchange, there_and_back (send and receive "
            "between neighbors), separated by commas."
        ),
    ] = None,
    ranks: Annotated[
        str | None, Option(help="Numbers of ranks; default: 2,4 (2,3,4 with --fit).")
    ] = None,
    algorithms: Annotated[
        str | None, Option(help="For example default,ring,tree; default: all.")
    ] = None,
    dtype: Annotated[
        str, Option(help="float32, float64, float16, bfloat16, int32, int64 or uint8.")
    ] = "float32",
    redop: Annotated[str, Option(help="sum, min, max or product.")] = "sum",
    turns: Annotated[int, Option(help="Turns: how many times each case is timed.")] = 9,
    check: Annotated[bool, Option(help="Count wrong elements.")] = True,
    transport: TransportName = None,
    save: Save = None,
    plot: Plot = None,
    fit: Annotated[
        bool, Option("--fit", help="Fit alpha and beta; write a table of algorithms.")
    ] = False,
    table: Annotated[
        Path | None,
        Option(help="File for --fit to write; default: in your settings.", callback=check_output),
    ] = None,
) -> None:
    """Print nccl-tests' table for labkit's collectives and the backend's own.

    Exits with status 1 if any element is wrong.
    """
    from labkit.bench import chooser_table, sweep_tables
    from labkit.bench import collectives as module
    from labkit.plot import bandwidth
    from labkit.sweeps.alpha_beta import fit_sweep
    from labkit.sweeps.sweep import parse_bytes, sizes_between

    if fit and transport == "shm":
        raise ValueError("--fit needs --transport gloo: ranks that share memory do not use a table")
    if table is not None and not fit:
        raise ValueError("--table names the file that --fit writes; pass --fit as well")
    if fit and dtype != "float32":
        raise ValueError(f"--fit needs --dtype float32, the dtype of training, not {dtype}")
    if fit and (other := [op for op in split_words(ops) if op not in chooser_table.OPS]):
        raise ValueError(
            f"--fit with {other[0]}: a table covers {', '.join(chooser_table.OPS)}; measure "
            f"{other[0]} without --fit"
        )
    defaults: Any = chooser_table if fit else module
    sweep = module.bench_collectives(
        sizes_between(parse_bytes(from_), parse_bytes(to), factor),
        defaults.OPS if ops is None else split_words(ops),
        defaults.RANKS if ranks is None else split_numbers("ranks", ranks),
        None if algorithms is None else split_words(algorithms), dtype, redop, turns, check,
        transport or ("gloo" if fit else None),
    )  # fmt: skip
    for shown in sweep_tables.tables(sweep):
        print_table(shown)
    if save is not None:
        _report_saved(sweep.save(save))
    if plot is not None:
        save_picture(bandwidth(sweep), plot, dpi="figure")
    if fit:
        fits = fit_sweep(sweep)
        print_table(sweep_tables.fit_table(fits))
        if doubts := sweep_tables.doubts(fits):
            console.print(f"[yellow]poor fit:[/] {markup(doubts)}")
        path = chooser_table.write_table(sweep, table or chooser_table.user_table())
        console.print(
            f"Table of algorithms: {path}\nTo use it, run this before starting ranks:  "
            f"export LABKIT_TABLE={path.resolve()}\n"
            'Only messages use the table, as in World(n, transport="gloo"); shared memory, '
            'as in World(n, transport="shm"), does not.', markup=False, soft_wrap=True,
        )  # fmt: skip
    if wrong := sum(point.wrong or 0 for point in sweep.points):
        console.print(f"[red]wrong:[/] {wrong} elements")
        raise typer.Exit(1)


@bench.command(
    epilog="Examples:  labkit bench transfers  ·  labkit bench transfers --mb 256 --to bf16  ·  "
    "labkit bench transfers --save transfers-h100.json --plot transfers.png"
)
def transfers(
    mb: Annotated[float, Option(help="Megabytes (1e6 bytes) of fp32 to transfer.")] = 64.0,
    gbps: Annotated[float, Option(help="Gigabits per second of the paced bus; 0: no bus.")] = 16.0,
    turns: Turns = 9,
    to: Annotated[str, Option(help="The dtype to cast to: fp16 or bf16.")] = "fp16",
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Time ways to copy a tensor between memories: pinned or not, cast before or after, ..."""
    from labkit import plot as draw

    times = _measure("transfers", None, mb, gbps, turns, to)
    if save is not None:
        _report_saved(times.save(save))
    if plot is not None:
        save_picture(draw.transfers(times.measured, times.rates), plot, dpi="figure")


def _measure(name: str, save: Path | None, *args: Any, **options: Any) -> Any:
    """Run `labkit.bench.bench_NAME`, print its table, and return the measurements."""
    from labkit.bench import harness

    module = import_module(f"labkit.bench.{name}")
    with console.status(f"measuring {name.replace('_', '-')} ..."):
        measured = getattr(module, f"bench_{name}")(*args, **options)
    print_table(module.table(measured))
    if save is not None:
        _report_saved(harness.save(measured, save))
    return measured


def _report_saved(path: Path) -> None:
    console.print(f"All measurements: {markup(path)}", soft_wrap=True)
