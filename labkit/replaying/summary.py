"""A recorded run replayed on several clusters, as a table: `labkit replay`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich import box
from rich.table import Table

from labkit.clusters import Cluster
from labkit.foreign import markup
from labkit.replaying.replays import Computing, replay
from labkit.trace import Split, Trace, split_of
from labkit.trace.measures import main_dtype


@dataclass(frozen=True)
class OnCluster:
    """The replay on one cluster, or `why_not`."""

    name: str
    replayed: Trace | None = None
    split: Split | None = None
    mfu: float | None = None
    why_not: str = ""


def on_clusters(
    trace: Trace, clusters: Mapping[str, Cluster], computing: Computing = "counted"
) -> list[OnCluster]:
    """Replays of `trace` on each cluster; where one is impossible, the reason instead."""
    replays, dtype = [], main_dtype(trace)
    for name, cluster in clusters.items():
        try:
            replayed = replay(trace, cluster, computing)
            split, mfu = split_of(replayed), None
            if computing == "counted" and split.flops is not None and dtype is not None:
                mfu = split.mfu(cluster.device.peak_flops_of(dtype))
            replays.append(OnCluster(name, replayed, split, mfu))
        except ValueError as error:
            replays.append(OnCluster(name, why_not=str(error)))
    return replays


def table(replays: Iterable[OnCluster]) -> Table:
    """The parts of a replayed step, one row for each cluster."""
    shown = Table(
        title="A step, replayed", title_justify="left", box=box.SIMPLE_HEAD,
        caption="exposed: waited for what was on the wire; bubble: for other ranks.\n"
        "MFU: counted operations over those that the devices could do in this time.",
        caption_justify="left", pad_edge=False,
    )  # fmt: skip
    shown.add_column("cluster")
    for name in ("ms", "computing", "exposed", "bubble", "MFU"):
        shown.add_column(name, justify="right", no_wrap=True)
    for on in replays:
        cells = [""] * 5
        if on.split is not None:
            parts = (on.split.compute_s, on.split.exposed_s, on.split.bubble_s)
            shares = [f"{seconds / on.split.step_s:.0%}" for seconds in parts]
            mfu = "" if on.mfu is None else f"{on.mfu:.1%}"
            cells = [f"{on.split.step_s * 1e3:,.3f}", *shares, mfu]
        shown.add_row(markup(on.name), *cells)
    return shown
