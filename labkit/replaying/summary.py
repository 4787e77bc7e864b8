"""A recorded run on one cluster after the other, as a table: `labkit replay`."""

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
    """Replay the trace on each."""
    found, dtype = [], main_dtype(trace)
    for name, where in clusters.items():
        try:
            replayed = replay(trace, where, computing)
            split, mfu = split_of(replayed), None
            if computing == "counted" and split.flops is not None and dtype is not None:
                mfu = split.mfu(where.device.peak_flops_of(dtype))
            found.append(OnCluster(name, replayed, split, mfu))
        except ValueError as error:
            found.append(OnCluster(name, why_not=str(error)))
    return found


def table(found: Iterable[OnCluster]) -> Table:
    """A row for each cluster."""
    shown = Table(
        title="A step, replayed", title_justify="left", box=box.SIMPLE_HEAD,
        caption="exposed: waited for what was on the wire; bubble: for other ranks.\n"
        "MFU: counted operations over those that the devices could do in this time.",
        caption_justify="left", pad_edge=False,
    )  # fmt: skip
    shown.add_column("cluster")
    for name in ("ms", "computing", "exposed", "bubble", "MFU"):
        shown.add_column(name, justify="right", no_wrap=True)
    for one in found:
        if one.split is None:
            shown.add_row(markup(one.name), *[""] * 5)
            continue
        parts = (one.split.compute_s, one.split.exposed_s, one.split.bubble_s)
        shares = [f"{seconds / one.split.step_s:.0%}" for seconds in parts]
        mfu = "" if one.mfu is None else f"{one.mfu:.1%}"
        shown.add_row(markup(one.name), f"{one.split.step_s * 1e3:,.3f}", *shares, mfu)
    return shown
