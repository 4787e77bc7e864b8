"""`labkit compare`: check strategies against one process. `labkit run`: train with a strategy."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from typer import Argument, Option

from labkit.cli.terminal import Dtype, Lr, Model, Rows, Seed, Steps, TextPath, app, console
from labkit.foreign import markup


@app.command(
    epilog="Examples:  labkit compare  ·  labkit compare ddp --ranks 3 --rows 7  ·  "
    "labkit compare --text my_notes/ --dtype float32"
)
def compare(
    strategies: Annotated[
        list[str] | None,
        Argument(help="Strategies, such as `single` or `ddp`; default: one per family."),
    ] = None,
    every: Annotated[
        bool, Option("--all", help="Compare every strategy, not only one per family.")
    ] = False,
    ranks: Annotated[int, Option(help="Number of ranks.", min=1)] = 4,
    model: Model = "1M",
    steps: Steps = 24,
    rows: Rows = 16,
    dtype: Dtype = "float64",
    lr: Lr = 1e-3,
    seed: Seed = 0,
    text: TextPath = None,
    out: Annotated[Path, Option(help="Folder for the recorded runs and pictures.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Train a small GPT with each strategy on real ranks, and compare with training in one process.

    Exits with status 1 if losses, weights, bytes sent or bytes held are wrong.
    """
    from labkit import compare as comparing
    from labkit.training import Task

    task = Task(model=model, steps=steps, rows=rows, dtype=dtype, lr=lr, seed=seed, text=text)
    results = comparing.compare(task, strategies, ranks, every, out=out)
    console.print(comparing.table(results, task))
    with console.status("drawing ..."):
        pictures = comparing.draw(results, out)
    console.print(f"Pictures: {markup(', '.join(map(str, pictures[:2])))}")
    console.print(f"To view a run: labkit view {markup(out / results[-1].strategy)}")
    problems = [f"{run.strategy}: {problem}" for run in results for problem in run.problems]
    for problem in problems:
        console.print(f"[red]not equal[/] {markup(problem)}")
    if problems:
        raise typer.Exit(1)
    console.print("[green]All equal:[/] losses, weights, replicas, bytes sent and bytes held.")


@app.command(
    epilog="Examples:  labkit run ddp --ranks 4  ·  labkit run ddp --record runs/ddp  ·  "
    "torchrun --nproc-per-node 4 -m labkit run ddp"
)
def run(
    strategy: Annotated[str, Argument(help="Name of a strategy, such as `ddp`.")],
    ranks: Annotated[
        int | None,
        Option(
            help="Ranks to start; default: 4. Omit under torchrun, which starts the ranks.", min=1
        ),
    ] = None,
    model: Model = "1M",
    steps: Steps = 24,
    rows: Rows = 16,
    dtype: Dtype = "float32",
    lr: Lr = 1e-3,
    seed: Seed = 0,
    text: TextPath = None,
    record: Annotated[
        Path | None, Option(help="Record the run in this folder, for `labkit view`.")
    ] = None,
) -> None:
    """Train with one strategy, on ranks started by this command, torchrun, srun or mpirun."""
    from labkit.compare import fitting
    from labkit.recipes import recipe
    from labkit.runtime.attach import attach
    from labkit.runtime.launchers import launched
    from labkit.runtime.world import World
    from labkit.trace import recording
    from labkit.training import Task, train

    chosen = recipe(strategy)
    task = Task(model=model, steps=steps, rows=rows, dtype=dtype, lr=lr, seed=seed, text=text)
    recorded: Callable[[], AbstractContextManager[object]] = nullcontext
    if record is not None:
        if record.exists() and not (record.is_dir() and not any(record.iterdir())):
            raise ValueError(f"{record} is not an empty folder; record into a new folder")
        recorded = partial(recording.record, record, min(2, steps - 1), what=strategy)
    if launcher := launched():
        if ranks is not None:
            raise ValueError(
                f"{launcher.launcher} has started the ranks; omit --ranks, and pass their number "
                f"to {launcher.launcher}, as in torchrun --nproc-per-node 4 or srun -n 4"
            )
        me = attach()
        with recorded():
            report = train(strategy, task, keep_weights=False)
        reports = me.comm.all_gather_object(report)
        if me.rank != 0:
            return
    else:
        if chosen.one_rank and ranks not in (None, 1):
            raise ValueError(f"{strategy} trains in one process; omit --ranks")
        size = 1 if chosen.one_rank else ranks or 4
        fitting([chosen], task, size, asked=True)
        with World(size) as world:
            console.print(f"{world.picked}")
            with recorded():
                reports = world.run(train, strategy, task, keep_weights=False)
    first_loss, last_loss = (
        sum(report.losses[i] for report in reports) / len(reports)  # fmean rejects inf - inf
        for i in (0, -1)
    )
    sent_bytes = fmean(report.measured.bus_bytes for report in reports)
    size = len(reports)
    console.print(
        f"{strategy} on {size} rank{'s' * (size > 1)}, {steps} steps: loss {first_loss:.4f} -> "
        f"{last_loss:.4f}, {max(report.step_s for report in reports) * 1e3:.0f} ms per step, "
        f"{sent_bytes / 1e6:.2f} MB sent per rank and step "
        f"(predicted {reports[0].predicted.bus_bytes / 1e6:.2f})"
    )
