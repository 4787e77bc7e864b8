"""A recorded run replayed on several clusters, as a table (`labkit replay`)."""

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
    """The replay on one cluster, or the reason why it is impossible (`why_not`)."""

    name: str
    replayed: Trace | None = None
    split: Split | None = None
    mfu: float | None = None
    why_not: str = ""


def on_clusters(
    trace: Trace, clusters: Mapping[str, Cluster], computing: Computing = "counted"
) -> list[OnCluster]:
    """Replay `trace` on each cluster; for an impossible replay, return the reason."""
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
    """The split of a replayed step, with one row per cluster."""
    shown = Table(
        title="One replayed step", title_justify="left", box=box.SIMPLE_HEAD,
        caption="exposed: waiting for a transfer; bubble: waiting for other ranks.\n"
        "MFU: counted FLOPs over the peak FLOPs of the devices in this time.",
        caption_justify="left", pad_edge=False,
    )  # fmt: skip
    shown.add_column("cluster")
    for name in ("ms", "computing", "exposed", "bubble", "MFU"):
        shown.add_column(name, justify="right", no_wrap=True)
    for run in replays:
        cells = [""] * 5
        if run.split is not None:
            parts = (run.split.compute_s, run.split.exposed_s, run.split.bubble_s)
            shares = [f"{seconds / run.split.step_s:.0%}" for seconds in parts]
            mfu = "" if run.mfu is None else f"{run.mfu:.1%}"
            cells = [f"{run.split.step_s * 1e3:,.3f}", *shares, mfu]
        shown.add_row(markup(run.name), *cells)
    return shown
