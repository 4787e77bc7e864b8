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
from labkit.events import CommEvent
from labkit.models import GPT
from labkit.parallel import DDP
from labkit.plot.timelines import TimelineView
from labkit.replaying import dry_run
from labkit.replaying.redrawing import Redrawing, changed
from labkit.trace import RankTrace, Span, Step, Trace

MODULES, BUCKETS, STEPS = 24, 6, 4  # in the run that is drawn


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
    """Show another step `turns` times, in both ways by turns; then replay a GPT on as many other
    clusters."""
    view = TimelineView(_make_run(ranks))
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
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.zeros(8, 64, dtype=torch.long)).sum().backward()
        optimizer.step()


def table(times: RedrawTimes) -> Table:
    """Milliseconds of a redraw, each way, and of a replay that is drawn."""
    what_if = f"what_if: replay of a GPT, {times.what_if_bars} bars, until its PNG is there"
    rows = [
        ("one collection of polygons, with names", f"{times.polygons_s * 1e3:.0f}", "100", "1"),
        (
            "separate bars (broken_barh), without names",
            f"{times.separate_s * 1e3:.0f}",
            "",
            f"{times.ratio:.1f}",
        ),
        (what_if, f"{times.what_if_s * 1e3:.0f}", "100", ""),
    ]
    title = f"Another step in a timeline of {times.ranks} ranks, {times.bars} bars"
    return titled(title, "", ("", "ms", "aim", "slower than polygons by"), ("",), rows)


def _make_run(ranks: int) -> Trace:
    """Made-up steps of data parallelism: modules, and all-reduces of buckets."""
    traces = {}
    for rank in range(ranks):
        trace = traces[rank] = RankTrace(rank, ranks)
        for index in range(STEPS):
            began_s, module_s = index * 0.1, 1e-3 * (1 + 0.05 * rank)
            now_s = began_s
            for phase in ("forward", "backward"):
                until_s = now_s + MODULES * module_s
                trace.spans.append(Span(phase, "", index, now_s, until_s))
                for number in range(MODULES):
                    name = f"blocks.{number // 4}.part{number % 4}"
                    span = Span(phase, name, index, now_s, now_s + module_s, 1, "Linear")
                    trace.spans.append(span)
                    now_s += module_s
            for bucket in range(BUCKETS):
                event = CommEvent(
                    "all_reduce", "default", tuple(range(ranks)), rank, index * BUCKETS + bucket,
                    "float32", (1000,), 4000, 6000, False, step=index,
                )  # fmt: skip
                event.issued_s = event.began_s = now_s - (BUCKETS - bucket - 1) * 4e-3
                event.ended_s = event.began_s + 3e-3
                trace.comms.append(event)
            trace.comms[-1].wait_began_s, trace.comms[-1].wait_ended_s = now_s, now_s + 3e-3
            trace.spans.append(Span("optimizer", "", index, now_s + 3e-3, now_s + 8e-3))
            trace.steps.append(Step(index, began_s, now_s + 8e-3))
    return Trace(traces)


if __name__ == "__main__":
    print_table(table(measure()))
