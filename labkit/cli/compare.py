"""`labkit compare`: strategies held against one process."""

from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.terminal import Dtype, Lr, Model, Rows, Seed, Steps, TextPath, console
from labkit.foreign import markup

EXAMPLES = (
    "Examples:  labkit compare  ·  labkit compare ddp --ranks 3 --rows 7  ·  "
    "labkit compare --text my_notes/ --dtype float32"
)


def compare(
    strategies: Annotated[
        list[str] | None, typer.Argument(help="Names, as `single` or `ddp`; if none: all families.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every strategy, not one a family.")] = False,
    ranks: Annotated[int, typer.Option(help="How many ranks.", min=1)] = 4,
    model: Model = "1M",
    steps: Steps = 24,
    rows: Rows = 16,
    dtype: Dtype = "float64",
    lr: Lr = 1e-3,
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

    task = Task(model=model, steps=steps, rows=rows, dtype=dtype, lr=lr, seed=seed, text=text)
    results = comparing.compare(task, strategies, ranks, every, out=out)
    console.print(comparing.table(results, task))
    with console.status("drawing ..."):
        pictures = comparing.draw(results, out)
    console.print(f"The pictures: {markup(', '.join(map(str, pictures[:2])))}")
    console.print(f"Each run: labkit view {markup(out / results[-1].strategy)}, and so on.")
    problems = [f"{run.strategy}: {problem}" for run in results for problem in run.problems]
    for problem in problems:
        console.print(f"[red]not equal[/] {markup(problem)}")
    if problems:
        raise typer.Exit(1)
    console.print("[green]All equal:[/] losses, weights, replicas, bytes sent and bytes held.")
