"""`labkit compare`: train strategies on the same data and check each against a single process.
Losses, weights (in float64), replicas and predicted bytes must match; times are not checked."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import psutil
import torch
from rich.table import Table

from labkit.foreign import check_output
from labkit.holdings import Footprint
from labkit.models import GPT
from labkit.recipes import RECIPES, Recipe, recipe
from labkit.runtime.pick import check_size
from labkit.runtime.world import World
from labkit.trace import Trace
from labkit.trace.folder import add_about
from labkit.trace.recording import record
from labkit.training import Report, Task, train

WEIGHTS_AGREE = 1e-10  # largest difference in any weight, float64
LOSSES_AGREE = {"float64": 1e-10, "float32": 1e-4}  # relative


@dataclass(frozen=True)
class Result:
    """One strategy's run, combined over its ranks, and the problems found."""

    strategy: str
    ranks: int
    losses: list[float]
    weight_difference: float  # largest absolute difference from the oracle
    predicted: Footprint  # per rank
    measured: Footprint  # mean over ranks
    step_s: float
    problems: list[str]
    trace: Trace = field(repr=False)


def compare(
    task: Task,
    strategies: Sequence[str] | None = None,
    ranks: int = 4,
    every: bool = False,
    out: Path = Path("runs/compare"),
) -> list[Result]:
    """Train with each strategy and compare the result with that of `single`, which runs first.

    Args:
        strategies: recipe names; by default one per family, or all recipes if `every` is true.
        out: the output folder, with a subfolder per strategy for its recorded run.
    """
    check_size(ranks)
    chosen = [recipe(name) for name in strategies or RECIPES if name != "single"]
    chosen = fitting(chosen, task, ranks, asked=bool(strategies))
    if not (strategies or every):  # one strategy per family: the last that fits
        chosen = list({strategy.family: strategy for strategy in chosen}.values())
    out.mkdir(parents=True, exist_ok=True)
    for name in ("compare.png", "steps.png"):
        check_output(out / name)
    with World(1) as world:
        (oracle,), trace = _recorded(world, "single", task, out)
    results = [_judge([oracle], oracle, task, trace)]
    with World(ranks) as world:
        print(f"{world.picked}; the ranks share {psutil.cpu_count()} cores")
        for strategy in chosen:
            reports, trace = _recorded(world, strategy.name, task, out)
            results.append(_judge(reports, oracle, task, trace))
    return results


def fitting(chosen: list[Recipe], task: Task, ranks: int, asked: bool) -> list[Recipe]:
    """The recipes that can train the task's model on `ranks` ranks. For other recipes,
    raises ValueError if `asked` (the user named the recipes), else prints why they are skipped."""
    with torch.device("meta"):
        model = GPT.preset(task.model)
    fitting = []
    for strategy in chosen:
        if not (why := strategy.unfit(model, task.rows, task.length, ranks)):
            fitting.append(strategy)
        elif asked:
            raise ValueError(f"{strategy.name}: {why}; choose other --ranks, --rows or --model")
        else:
            print(f"{strategy.name} is skipped: {why}")
    return fitting


def _recorded(world: World, name: str, task: Task, out: Path) -> tuple[list[Report], Trace]:
    """Train and record, the third step in detail: all state is allocated by then."""
    detail_step = min(2, task.steps - 1)
    with record(out / name, detail_step, replace=True, what=name, task=asdict(task)) as trace:
        reports = world.run(train, name, task)
    predicted = asdict(reports[0].predicted)
    trace.about["predicted"] = predicted
    add_about(out / name, predicted=predicted)
    return reports, trace


def _judge(reports: list[Report], oracle: Report, task: Task, trace: Trace) -> Result:
    """Combine the ranks' reports and compare them with the oracle and the predictions."""
    first, size = reports[0], len(reports)
    losses = [sum(parts) / len(parts) for parts in zip(*(report.losses for report in reports))]
    means = {
        name: fmean(getattr(report.measured, name) for report in reports)
        for name in Footprint.__dataclass_fields__
    }
    problems = []
    ours, theirs = torch.tensor(losses), torch.tensor(oracle.losses)
    error = float(((ours - theirs).abs() / theirs.abs()).max())  # propagates NaN, unlike `max`
    if not error <= LOSSES_AGREE[task.dtype]:
        problems.append(f"losses differ from single-process training by {error:.1e}")
    difference = _difference(reports, oracle)
    if task.dtype == "float64" and not difference <= WEIGHTS_AGREE:
        problems.append(f"weights differ from single-process training by {difference:.1e}")
    if (spread := _difference(reports, first)) != 0:
        problems.append(f"weights differ between replicas by {spread:.1e}")
    for name, mean in means.items():
        if mean != (expected := getattr(first.predicted, name)):
            problems.append(f"{name}: measured {mean:,.1f}, predicted {expected:,.1f}")
    return Result(
        first.strategy, size, losses, difference, first.predicted, Footprint(**means),
        max(report.step_s for report in reports), problems, trace,
    )  # fmt: skip


def _difference(reports: list[Report], other: Report) -> float:
    pairs = [(report.weights[name], x) for report in reports for name, x in other.weights.items()]
    return float(torch.stack([(x - y).abs().max() for x, y in pairs]).max())  # propagates NaN


def table(results: list[Result], task: Task) -> Table:
    """The results as a table 80 characters wide: loss, error, bytes sent and held, step time."""
    shown = Table(
        title=f"GPT {task.model}, {task.rows} x {task.length} tokens per step, {task.steps} steps, "
        f"{task.dtype}",
        caption="loss: at the last step\nerror: largest difference of any weight from `single`\n"
        "sent: MB per rank and step, measured (predicted)\n"
        "held: MB per rank, parameters/gradients/optimizer",
        title_justify="left", caption_justify="left", pad_edge=False, padding=(0, 1, 0, 0),
        box=None,  # no lines between the columns, to fit 80 characters
    )  # fmt: skip
    shown.add_column("strategy", no_wrap=True)
    for name in ("ranks", "loss", "error", "sent", "held", "ms/step", ""):
        shown.add_column(name, justify="right", no_wrap=True)
    for run in results:
        measured, predicted = run.measured, run.predicted
        held = measured.parameter_bytes, measured.gradient_bytes, measured.optimizer_bytes
        shown.add_row(
            run.strategy, str(run.ranks), f"{run.losses[-1]:.4f}", f"{run.weight_difference:.0e}",
            f"{measured.bus_bytes / 1e6:.2f} ({predicted.bus_bytes / 1e6:.2f})",
            "/".join(f"{nbytes / 1e6:.1f}" for nbytes in held), f"{run.step_s * 1e3:.0f}",
            "[red]✗[/]" if run.problems else "[green]✓[/]",
        )  # fmt: skip
    return shown


def draw(results: list[Result], out: Path) -> list[Path]:
    """Draw losses, measured and predicted bytes, the breakdown of step time and, in each run's
    folder, the timeline and memory of the run. Return the paths of the pictures."""
    from labkit import plot, view
    from labkit.plot.strategies import draw_comparison

    draw_comparison(results, out / "compare.png")
    plot.compare({run.strategy: run.trace for run in results}).savefig(out / "steps.png", dpi=120)
    own = [picture for run in results for picture in view.draw(run.trace, out / run.strategy)]
    return [out / "compare.png", out / "steps.png", *own]
