"""How long a slider waits for its picture: a timeline redrawn on its axes as one collection of
polygons, beside the same bars drawn separately; and a replayed step, drawn and packed as a PNG.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from matplotlib.figure import Figure
from rich.table import Table

from labkit.bench.harness import titled
from labkit.cli.terminal import print_table
from labkit.clusters import cluster
from labkit.models import GPT
from labkit.parallel import DDP
from labkit.plot.timelines import TimelineView
from labkit.replaying import dry_run
from labkit.replaying.redrawing import Redrawing, changed
from labkit.runtime.world import World
from labkit.trace.recording import record

STEPS = 4  # in the run that is drawn


@dataclass(frozen=True)
class RedrawTimes:
    """Seconds until the new picture is drawn in pixels; medians."""

    ranks: int
    bars: int
    polygons_s: float
    separate_s: float
    what_if_s: float
    what_if_bars: int

    @property
    def ratio(self) -> float:
        return self.separate_s / self.polygons_s


def measure(ranks: int = 8, turns: int = 15) -> RedrawTimes:
    """Show another step of DDP `turns` times, in both ways by turns; then replay one on as many
    other clusters."""
    with World(ranks) as world, record() as trace:
        world.run(_train)
    view = TimelineView(trace)
    figure = Figure(tuple(view.figure.get_size_inches()), dpi=view.figure.dpi)
    axes = figure.subplots()

    def polygons(step: int) -> None:
        view.redraw(step)
        view.figure.canvas.draw()

    def separate(step: int) -> None:
        axes.clear()
        for bar in view.bars:
            place = (bar.top, bar.bottom - bar.top)
            axes.broken_barh([(bar.begin_ms, bar.end_ms - bar.begin_ms)], place, color=bar.colour)
        figure.canvas.draw()

    seconds: dict[Callable[[int], None], list[float]] = {polygons: [], separate: []}
    for turn in range(turns + STEPS):  # the first time a step is shown is not counted
        for draw, samples in seconds.items():
            began_s = time.perf_counter()
            draw(turn % STEPS)
            if turn >= STEPS:
                samples.append(time.perf_counter() - began_s)
    medians = [median(samples) for samples in seconds.values()]
    return RedrawTimes(ranks, len(view.bars), *medians, *_what_if(ranks, turns))


def _what_if(ranks: int, turns: int) -> tuple[float, int]:
    """Seconds of a slider of `what_if`, and how many bars it draws: DDP of a GPT of four blocks, on
    nodes of two devices, with a different bandwidth between them each time."""
    recorded, redrawing, seconds = dry_run(_train, ranks=ranks), Redrawing(ranks), []
    pod = cluster("dgx-h100")
    for turn in range(turns + 1):  # the first is not counted: it makes the figure
        began_s = time.perf_counter()
        gb_per_s = 50 / (1 + turn % 10)
        redrawing.draw(recorded, changed(pod, ranks, None, gb_per_s * 1e9, devices_per_node=2))
        seconds.append(time.perf_counter() - began_s)
    assert redrawing.view is not None
    return median(seconds[1:]), len(redrawing.view.bars)


def _train() -> None:
    model = DDP(GPT.preset("1M"), bucket_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.zeros(8, 64, dtype=torch.long)).sum().backward()
        optimizer.step()


def table(times: RedrawTimes) -> Table:
    """Milliseconds of a redraw, each way, and of a replay that is drawn."""
    what_if = f"what_if: replay of a GPT, {times.what_if_bars} bars, until its PNG is there"
    rows = [
        ("one collection of polygons, with names", f"{times.polygons_s * 1e3:.0f}", "100", "1"),
        ("separate bars (broken_barh), without names", f"{times.separate_s * 1e3:.0f}", "",
         f"{times.ratio:.1f}"),
        (what_if, f"{times.what_if_s * 1e3:.0f}", "100", ""),
    ]  # fmt: skip
    title = f"Another step in a timeline of {times.ranks} ranks, {times.bars} bars"
    return titled(title, "", ("", "ms", "aim", "slower than polygons by"), ("",), rows)


if __name__ == "__main__":
    print_table(table(measure()))
