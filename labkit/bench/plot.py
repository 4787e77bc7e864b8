"""How long a slider waits: a timeline drawn again on its axes, as one collection of polygons,
against the same bars drawn one by one; and a step that is replayed, drawn and packed as a PNG.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from matplotlib.figure import Figure
from rich.table import Table

from labkit.clusters import cluster
from labkit.events import CommEvent
from labkit.models import GPT
from labkit.parallel import DDP
from labkit.plot.timelines import TimelineView
from labkit.replaying import changed, dry_run
from labkit.replaying.redrawing import Redrawing
from labkit.trace import RankTrace, Span, Step, Trace

MODULES, BUCKETS, STEPS = 24, 6, 4  # of the run that is drawn


@dataclass(frozen=True)
class PlotTimes:
    """Seconds until the new picture is there in pixels; medians."""

    ranks: int
    bars: int
    ours_s: float
    separate_s: float
    what_if_s: float
    what_if_bars: int

    @property
    def ratio(self) -> float:
        return self.separate_s / self.ours_s


def bench_plot(ranks: int = 8, turns: int = 15) -> PlotTimes:
    """Show another step `turns` times, in each of the two ways, in turns; then replay a GPT on as
    many other clusters."""
    view = TimelineView(_run(ranks))
    figure = Figure(tuple(view.figure.get_size_inches()), dpi=view.figure.dpi)
    axes = figure.subplots()

    def ours(step: int) -> None:
        view.redraw(step)
        view.figure.canvas.draw()

    def separate(step: int) -> None:
        axes.clear()
        for bar in view.bars:
            place = (bar.top, bar.bottom - bar.top)
            axes.broken_barh([(bar.begin_ms, bar.end_ms - bar.begin_ms)], place, color=bar.colour)
        figure.canvas.draw()

    seconds: dict[Callable[[int], None], list[float]] = {ours: [], separate: []}
    for turn in range(turns + STEPS):  # the first time a step is shown is not counted
        for way, taken in seconds.items():
            began_s = time.perf_counter()
            way(turn % STEPS)
            if turn >= STEPS:
                taken.append(time.perf_counter() - began_s)
    what_if_s, what_if_bars = _what_if(ranks, turns)
    return PlotTimes(
        ranks, len(view.bars), median(seconds[ours]), median(seconds[separate]), what_if_s,
        what_if_bars,
    )  # fmt: skip


def _what_if(ranks: int, turns: int) -> tuple[float, int]:
    """Seconds of a slider of `what_if`, and how many bars it draws: DDP of a GPT of four blocks,
    on nodes of two devices with another bandwidth between them each time."""
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
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.zeros(8, 64, dtype=torch.long)).sum().backward()
        optimizer.step()


def table(found: PlotTimes) -> Table:
    """What `bench_plot` found."""
    shown = Table(
        title=f"Another step in a timeline of {found.ranks} ranks, {found.bars} bars",
        title_justify="left",
    )
    for name in ("", "ms", "aim", "slower than ours by"):
        shown.add_column(name, justify="left" if not name else "right")
    shown.add_row("one collection of polygons, with names", f"{found.ours_s * 1e3:.0f}", "100", "1")
    shown.add_row(
        "separate bars (broken_barh), without names", f"{found.separate_s * 1e3:.0f}", "",
        f"{found.ratio:.1f}",
    )  # fmt: skip
    shown.add_row(
        f"what_if: replay of a GPT, {found.what_if_bars} bars, until its PNG is there",
        f"{found.what_if_s * 1e3:.0f}", "100", "",
    )  # fmt: skip
    return shown


def _run(ranks: int) -> Trace:
    """Steps of data parallelism, made by hand: modules, and buckets on their way."""
    traces = {}
    for rank in range(ranks):
        one = traces[rank] = RankTrace(rank, ranks)
        for index in range(STEPS):
            began_s, module_s = index * 0.1, 1e-3 * (1 + 0.05 * rank)
            now_s = began_s
            for phase in ("forward", "backward"):
                until_s = now_s + MODULES * module_s
                one.spans.append(Span(phase, "", index, now_s, until_s))
                for number in range(MODULES):
                    name = f"blocks.{number // 4}.part{number % 4}"
                    span = Span(phase, name, index, now_s, now_s + module_s, 1, "Linear")
                    one.spans.append(span)
                    now_s += module_s
            for bucket in range(BUCKETS):
                event = CommEvent(
                    "all_reduce", "default", tuple(range(ranks)), rank, index * BUCKETS + bucket,
                    "float32", (1000,), 4000, 6000, False, step=index,
                )  # fmt: skip
                event.issued_s = event.began_s = now_s - (BUCKETS - bucket - 1) * 4e-3
                event.ended_s = event.began_s + 3e-3
                one.comms.append(event)
            one.comms[-1].wait_began_s, one.comms[-1].wait_ended_s = now_s, now_s + 3e-3
            one.spans.append(Span("optimizer", "", index, now_s + 3e-3, now_s + 8e-3))
            one.steps.append(Step(index, began_s, now_s + 8e-3))
    return Trace(traces)
