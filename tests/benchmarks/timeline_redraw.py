"""How long a slider waits for its picture: a timeline redrawn on its axes, and a replayed step,
drawn and packed as a PNG.
"""

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from rich.table import Table

from labkit.bench.harness import seconds_of, titled
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
    redraw_s: float
    what_if_s: float
    what_if_bars: int


def measure(ranks: int = 8, turns: int = 15) -> RedrawTimes:
    """Show another step of DDP `turns` times; then replay one on as many other clusters."""
    with World(ranks) as world, record() as trace:
        world.run(_train, STEPS)
    view = TimelineView(trace)

    def seconds_until_drawn(turn: int) -> float:
        return seconds_of(partial(view.redraw, turn % STEPS), 1, after=view.figure.canvas.draw)

    seconds = [seconds_until_drawn(turn) for turn in range(turns + STEPS)]
    redraw_s = median(seconds[STEPS:])  # the first time a step is shown is not counted
    return RedrawTimes(ranks, len(view.bars), redraw_s, *_what_if(ranks, turns))


def _what_if(ranks: int, turns: int) -> tuple[float, int]:
    """Seconds of a slider of `what_if`, and how many bars it draws: DDP of a GPT of four blocks, on
    nodes of two devices, with a different bandwidth between them each time."""
    recorded, redrawing, pod = (
        dry_run(_train, 2, ranks=ranks),
        Redrawing(ranks),
        cluster("dgx-h100"),
    )

    def draw(turn: int) -> None:
        bytes_per_s = 50e9 / (1 + turn % 10)
        redrawing.draw(recorded, changed(pod, ranks, None, bytes_per_s, devices_per_node=2))

    # The first is not counted: it makes the figure.
    seconds = [seconds_of(partial(draw, turn), 1) for turn in range(turns + 1)]
    assert redrawing.view is not None
    return median(seconds[1:]), len(redrawing.view.bars)


def _train(steps: int) -> None:
    model = DDP(GPT.preset("1M"), bucket_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.zeros(8, 64, dtype=torch.long)).sum().backward()
        optimizer.step()


def table(times: RedrawTimes) -> Table:
    """Milliseconds of a redraw, and of a replay that is drawn."""
    another = f"another step in a timeline of {times.ranks} ranks, {times.bars} bars"
    what_if = f"what_if: replay of a GPT, {times.what_if_bars} bars, until its PNG is there"
    rows = [
        (another, f"{times.redraw_s * 1e3:.0f}", "100"),
        (what_if, f"{times.what_if_s * 1e3:.0f}", "100"),
    ]
    return titled("How long a slider waits for its picture", "", ("", "ms", "aim"), ("",), rows)


if __name__ == "__main__":
    print_table(table(measure()))
