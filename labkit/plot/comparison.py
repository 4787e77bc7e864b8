"""Strategies side by side: their losses over the steps, and the bytes that one rank sends."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure

from labkit.parallel.footprint import Footprint
from labkit.plot.style import COLOURS, DASHES, MEASURED, PREDICTED


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


def draw_comparison(results: Sequence[Compared], path: Path) -> Figure:
    """Draw `results` and save the picture as `path` (PNG)."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, sent, held = figure.subplots(1, 3, width_ratios=[1.2, 1, 1])
    for i, one in enumerate(results):
        losses.plot(
            range(1, len(one.losses) + 1), one.losses, DASHES[i % len(DASHES)],
            color=COLOURS[i % len(COLOURS)], lw=5 - 1.5 * min(i, 2), label=one.strategy,
            alpha=0.9,
        )  # fmt: skip
    losses.set(title="Loss: the lines lie on each other", xlabel="step", ylabel="nats per token")
    losses.legend(frameon=False)
    names = [f"{one.strategy}\n{one.ranks} rank{'s' * (one.ranks > 1)}" for one in results]
    places = range(len(results))
    for offset, footprints, label, colour in [
        (-0.2, [one.measured for one in results], "measured", MEASURED),
        (0.2, [one.predicted for one in results], "predicted", PREDICTED),
    ]:
        where = [place + offset for place in places]
        sent.bar(
            where, [one.bus_bytes / 1e6 for one in footprints], 0.38, color=colour, label=label
        )
    most = max(one.predicted.bus_bytes for one in results) / 1e6 or 1
    sent.set(title="Sent by one rank in a step", ylabel="MB", ylim=(0, most * 1.2))
    sent.legend(frameon=False, ncols=2, loc="upper left", fontsize="small")
    base = [0.0] * len(results)
    for name, label, colour in [
        ("parameter_bytes", "parameters", COLOURS[0]),
        ("gradient_bytes", "gradients", COLOURS[1]),
        ("optimizer_bytes", "optimizer", COLOURS[2]),
    ]:
        heights = [getattr(one.measured, name) / 1e6 for one in results]
        held.bar(places, heights, 0.6, bottom=base, color=colour, label=label)
        base = [low + height for low, height in zip(base, heights)]
    held.set(title="Held by one rank", ylabel="MB", ylim=(0, max(base) * 1.2))
    held.legend(frameon=False, ncols=3, loc="upper left", fontsize="small", columnspacing=0.8)
    for axes in (sent, held):
        axes.set_xticks(list(places), names)
    for axes in (losses, sent, held):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return figure
