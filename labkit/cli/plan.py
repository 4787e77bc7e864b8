"""`labkit plan`: rank the layouts of a model on a cluster, or check whether any layout fits."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer import Option

from labkit.cli.terminal import Plot, app, console, save_picture, split_numbers
from labkit.foreign import markup

if TYPE_CHECKING:
    from labkit.clusters import Cluster
    from labkit.predict.tables import Table as Words
    from labkit.replaying.planning.layout import Sizes
    from labkit.replaying.planning.plan import Fit, Plan

WIDTH = 168  # columns of the table of layouts
Numbers = Annotated[str | None, Option(help="Only these sizes, separated by commas; default: all.")]


@app.command(
    epilog="Examples:  labkit plan --model gpt3-175b --cluster selene --gpus 1024 --batch 1536  ·  "
    "labkit plan --width 8192 --depth 48 --heads 64 --cluster selene --gpus 512 --batch 1536 "
    "--tp 4,8,16 --chunks 1 --plot plan.png  ·  "
    "labkit plan --model megatron-1008b --cluster dgx-h100 --gpus 256 --batch 512 --fits  ·  "
    "labkit plan --model gpt3-175b --cluster selene --gpus 64 --batch 64 --largest"
)
def plan(
    cluster: Annotated[str, Option(help="Such as `selene` or `dgx-h100`.")],
    batch: Annotated[int, Option(help="Rows per step, over all replicas.", min=1, max=1 << 20)],
    model: Annotated[
        str | None, Option(help="Such as `gpt3-175b`; or pass --width, --depth and --heads.")
    ] = None,
    width: Annotated[int | None, Option(help="Width of the model.", min=1, max=1 << 17)] = None,
    depth: Annotated[int | None, Option(help="Blocks of the model.", min=1, max=2048)] = None,
    heads: Annotated[int | None, Option(help="Attention heads.", min=1)] = None,
    context: Annotated[
        int | None, Option(help="Tokens per row; default: 2048.", min=1, max=1 << 22)
    ] = None,
    vocab: Annotated[
        int | None, Option(help="Size of the vocabulary; default: 51200.", min=1, max=1 << 22)
    ] = None,
    gpus: Annotated[int | None, Option(help="Number of GPUs; default: all.", min=1)] = None,
    clusters: Annotated[
        Path | None, Option(help="A file with your own clusters, for --cluster.")
    ] = None,
    tp: Numbers = None,
    pp: Numbers = None,
    dp: Numbers = None,
    microbatch: Annotated[
        str | None, Option(help="Rows per micro-batch; default: powers of two.")
    ] = None,
    chunks: Annotated[str | None, Option(help="Chunks per stage; default: powers of two.")] = None,
    zero: Annotated[str | None, Option(help="0, 1 or both, separated by commas.")] = None,
    sequence: Annotated[
        bool | None, Option(help="Sequence parallelism; default: with and without.")
    ] = None,
    recompute: Annotated[
        bool | None, Option(help="Recompute blocks in backward; default: with and without.")
    ] = None,
    max_memory: Annotated[
        float | None, Option(help="Memory to use per device, in GB (1e9 bytes); default: all.")
    ] = None,
    top: Annotated[int, Option(help="Number of layouts to show.", min=1)] = 10,
    as_json: Annotated[bool, Option("--json", help="Print all results as JSON.")] = False,
    plot: Plot = None,
    fits: Annotated[
        bool,
        Option("--fits", help="Only check whether the model fits; list memory by category."),
    ] = False,
    largest: Annotated[
        bool,
        Option(
            "--largest",
            help="Find the deepest model of this width that fits; without a model, the largest "
            "published model that fits.",
        ),
    ] = False,
) -> None:
    """List and compare all layouts of a GPT that fit on a cluster, fastest first.

    Each layout's step time comes from a replay of its compute and communication.
    """
    from labkit.clusters import cluster as find_cluster

    if sum((fits, largest, plot is not None)) > 1:
        raise ValueError("--fits, --largest and --plot are mutually exclusive; pass one of them")
    where = find_cluster(cluster, clusters)
    sizes = _sizes(model, width=width, depth=depth, heads=heads, context=context, vocab=vocab)
    if sizes is None and not largest:
        raise ValueError("no model; pass --model gpt3-175b, or --width, --depth and --heads")
    asked: dict[str, Any] = {
        "gpus": gpus,
        "max_memory_bytes": None if max_memory is None else max_memory * 1e9,
        "sequence": sequence,
        "recompute": {None: None, True: "full", False: "none"}[recompute],
    }
    several = {"tp": tp, "pp": pp, "dp": dp, "microbatch": microbatch, "chunks": chunks,
               "zero": zero}  # fmt: skip
    asked |= {name: split_numbers(name, text) for name, text in several.items() if text is not None}
    if fits or largest:
        _show_fit(_fit(sizes, where, batch, largest, asked), largest, as_json)
        return
    from labkit.replaying.planning import ranking

    assert sizes is not None
    planned = ranking.plan(sizes, where, batch, **asked)
    if as_json:
        typer.echo(planned.to_json())
    else:
        _show(planned, top)
    if plot is not None:
        from labkit.plot.plans import plan as draw

        save_picture(draw(planned), plot, quiet=as_json)


def _show(planned: "Plan", top: int) -> None:
    best, large, count = planned.best, len(planned.too_large), len(planned.reports)
    console.print(
        f"{best.sizes.parameters / 1e9:,.1f}B parameters on {best.layout.ranks:,} × "
        + markup(f"{planned.cluster.device.name} ({planned.cluster.title})")
        + f", {best.global_batch:,} rows: {count:,} of {count + large:,} layouts fit, "
        f"planned in {planned.took_s:.1f} s", highlight=False, soft_wrap=True,
    )  # fmt: skip
    wide = Console(width=max(WIDTH, console.width))
    wide.print(_in_terminal(planned.table(top)), _in_terminal(planned.trades(near=1)), sep="")
    if large:
        nearest = planned.too_large[0]
        console.print(
            f"the smallest layout that does not fit: {nearest.layout.in_words} "
            f"{markup(planned.why(nearest.layout))}", highlight=False, soft_wrap=True,
        )  # fmt: skip


def _in_terminal(words: "Words") -> Table:
    """A table whose last column wraps."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in words.heads[:-1]:
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column(words.heads[-1])
    for row in words.rows:
        shown.add_row(*row)
    return shown


def _fit(
    sizes: "Sizes | None", where: "Cluster", batch: int, largest: bool, asked: dict[str, Any]
) -> "Fit":
    """The fit of the model, else of the largest published model that fits, else of the smallest."""
    from labkit.replaying.planning import ranking
    from labkit.replaying.planning.published import MODELS

    if sizes is not None:
        ask = ranking.largest_that_fits if largest else ranking.fits
        return ask(sizes, where, batch, **asked)
    fit = None
    for model in sorted(MODELS.values(), key=lambda model: -model.parameters):
        try:
            fit = ranking.fits(model, where, batch, **asked)
        except ValueError as error:  # sizes not divisible; try the next model
            invalid = error
            continue
        if fit.fits:
            break
    if fit is None:
        raise invalid
    return fit


def _show_fit(fit: "Fit", largest: bool, as_json: bool) -> None:
    """Print a fit. Exits with status 1 if the model does not fit."""
    report = fit.report
    if as_json:
        contents = {
            "fits": fit.fits,
            "model": {**asdict(report.sizes), "parameters": report.sizes.parameters},
            "layout": asdict(report.layout),
            "budget_bytes": fit.budget_bytes,
            "peak_bytes": report.peak_bytes,
            "memory_bytes": dict(report.memory_bytes),
        }
        typer.echo(json.dumps(contents, indent=1))
    else:
        words = f"{'the largest: ' * largest}{markup(fit)}"
        console.print(words, highlight=False, soft_wrap=True)
        console.print(f"{fit.table()}", highlight=False)
    if not fit.fits:
        raise typer.Exit(1)


def _sizes(name: str | None, **given: int | None) -> "Sizes | None":
    """The named model with the given changes, a model of your own, or None if neither a
    name nor sizes are given."""
    from labkit.replaying.planning.layout import Sizes
    from labkit.replaying.planning.published import model

    sizes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if name is not None:
        return replace(model(name), **sizes)
    if not sizes:
        return None
    if missing := [f"--{key}" for key in ("width", "depth", "heads") if key not in sizes]:
        raise ValueError(f"no {' and no '.join(missing)}; pass --width, --depth and --heads")
    return Sizes(**sizes)
