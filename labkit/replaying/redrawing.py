"""One picture for many replays: what the sliders of `what_if` draw."""

from dataclasses import replace

from labkit.clusters import Cluster
from labkit.plot.choice import choose_step
from labkit.plot.figure import png
from labkit.plot.timelines import TimelineView
from labkit.replaying.replays import replay
from labkit.trace import Split, Trace, split_of
from labkit.trace.measures import main_dtype

ROOM = 1.5  # length of a new time axis, in steps
LEAST_PART = 0.25  # of the axis that a step takes, before the axis gets shorter


class Redrawing:
    """Replays of the first `most_ranks` ranks, drawn on the same axes, whose length stays while a
    step takes between a quarter and all of it."""

    def __init__(self, most_ranks: int = 8):
        self.most_ranks = most_ranks
        self.axis_s = 0.0
        self.view: TimelineView | None = None

    def draw(self, recorded: Trace, cluster: Cluster) -> tuple[bytes, Split]:
        """The timeline of the replay as a PNG, and where the time of its step went."""
        # Memory points are most of a trace, and a timeline does not show them.
        ranks = {number: replace(one, memory=[]) for number, one in recorded.ranks.items()}
        replayed = replay(replace(recorded, ranks=ranks), cluster)
        step = choose_step(replayed)
        split = split_of(replayed, step)
        self.axis_s = next_axis_s(self.axis_s, split.step_s)
        shown = replayed.expanded([*replayed.record_of][: self.most_ranks])
        if self.view is None:
            self.view = TimelineView(shown, step)
        self.view.show(shown, step, until_s=self.axis_s)
        self.view.axes.set_xlabel(f"ms  ·  {wires_in_words(cluster)}", labelpad=2)
        return png(self.view.figure), split


def next_axis_s(axis_s: float, step_s: float) -> float:
    """The length of the time axis for this step, after one of `axis_s`."""
    return axis_s if LEAST_PART * axis_s <= step_s <= axis_s else ROOM * step_s


def wires_in_words(cluster: Cluster) -> str:
    """ "NVLink 3 300 GB/s, 3.4 µs": shown even where a change has no effect."""
    levels = [cluster.inside, *([cluster.between] if cluster.between and cluster.nodes > 1 else [])]
    return "  ·  ".join(
        f"{x.name} {x.bytes_per_s / 1e9:.3g} GB/s, {x.latency_s * 1e6:.3g} µs" for x in levels
    )


def in_words(split: Split, recorded: Trace, cluster: Cluster) -> str:
    """ "12.30 ms: computing 45%, exposed ...; MFU 20.1% of ...", for the dtype of most FLOPs."""
    dtype = main_dtype(recorded)
    if split.flops is None or dtype is None:
        return str(split)
    mfu = split.mfu(cluster.device.peak_flops_of(dtype))
    return f"{split}; MFU {mfu:.1%} of the {dtype} peak of {cluster.device.name}"
