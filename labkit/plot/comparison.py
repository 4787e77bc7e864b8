"""Strategies side by side: their losses over the steps, and the bytes that one rank sends and
holds, measured and predicted. `labkit.plot.strategies` draws what their recorded runs tell.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.parallel.common.footprint import Footprint
from labkit.plot.picture import Picture, styled
from labkit.plot.stacks import Part, legend_below, name_bars, stack
from labkit.plot.style import CATEGORIES, COLOURS, DASHES, MEASURED, PREDICTED


class Compared(Protocol):
    """What is drawn of a strategy."""

    @property
    def strategy(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def losses(self) -> list[float]: ...
    @property
    def measured(self) -> Footprint: ...
    @property
    def predicted(self) -> Footprint: ...


@styled
def draw_comparison(results: Sequence[Compared], path: Path) -> Figure:
    """Draw `results` and save the picture as `path` (PNG)."""
    figure = Picture(max(3.6, 1.8 + 0.5 * len(results)), layout="constrained")
    losses, sent, held = figure.subplots(1, 3, width_ratios=[1.2, 1, 1])
    held.sharey(sent)
    _draw_losses(losses, results)
    _draw_sent(sent, results)
    stack(held, [
        Part("parameters", [one.measured.parameter_bytes / 1e6 for one in results],
             CATEGORIES["parameters"]),
        Part("gradients", [one.measured.gradient_bytes / 1e6 for one in results],
             CATEGORIES["gradients"]),
        Part("optimizer state", [one.measured.optimizer_bytes / 1e6 for one in results],
             CATEGORIES["optimizer state"]),
    ])  # fmt: skip
    held.set(title="Held by one rank", xlabel="MB")
    names = [f"{one.strategy}\n{one.ranks} rank{'s' * (one.ranks > 1)}" for one in results]
    for axes in (sent, held):
        name_bars(axes, names)
    held.tick_params(labelleft=False)
    figure.savefig(path, dpi=120)
    return figure


def _draw_losses(axes: Axes, results: Sequence[Compared]) -> None:
    for i, one in enumerate(results):
        axes.plot(
            range(1, len(one.losses) + 1), one.losses, DASHES[i % len(DASHES)],
            color=COLOURS[i % len(COLOURS)], lw=5 - 1.5 * min(i, 2), label=one.strategy,
            alpha=0.9,
        )  # fmt: skip
    axes.set(title="Loss: the lines lie on each other", xlabel="step", ylabel="nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def _draw_sent(axes: Axes, results: Sequence[Compared]) -> None:
    for offset, footprints, label, colour in [
        (-0.2, [one.measured for one in results], "measured", MEASURED),
        (0.2, [one.predicted for one in results], "predicted", PREDICTED),
    ]:
        places = [place + offset for place in range(len(results))]
        lengths = [one.bus_bytes / 1e6 for one in footprints]
        axes.barh(places, lengths, 0.38, color=colour, label=label)
    most = max(one.predicted.bus_bytes for one in results) / 1e6 or 1
    axes.set(title="Sent by one rank in a step", xlabel="MB", xlim=(0, most * 1.05))
    legend_below(axes)
