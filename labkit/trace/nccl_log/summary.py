"""A log of NCCL as a table, and what in it deserves a second look."""

from collections import Counter
from itertools import islice

from rich.table import Table

from labkit.foreign import markup
from labkit.trace.nccl_log.log import Communicator, Connection, NcclLog

MOST_SHOWN = 4  # warnings, hosts or rings


def table(log: NcclLog, name: str = "NCCL log") -> Table:
    """What the log says of its largest communicator. Raises ValueError for a log without one."""
    group = log.main
    shown = Table(show_header=False, title=markup(name), title_justify="left")
    rows = [
        ("NCCL", log.version or "not said"),
        ("ranks", _ranks(group)),
        ("network", ", ".join(log.networks) or "not said"),
        *(("cards", f"{host}: {', '.join(cards)}") for host, cards in sorted(log.cards.items())),
        ("channels", str(group.channels or "not said")),
        *_rings(group),
        *_links(group, "inside nodes", inside=True),
        *_links(group, "between nodes", inside=False),
        ("settings", ", ".join(f"{k}={v}" for k, v in log.settings.items()) or "none said"),
    ]
    if len(log.communicators) > 1:
        others = ", ".join(str(other.size) for other in log.communicators[1:])
        rows.append(("others", f"{len(log.communicators) - 1} communicators, of {others} ranks"))
    for left, right in rows:
        shown.add_row(left, markup(right))
    for remark in remarks(log):
        shown.add_row("[red]look here[/]", markup(remark))
    return shown


def remarks(log: NcclLog) -> list[str]:
    """What often makes NCCL slow or fail, where the log shows it: a sentence for each.

    Source: NCCL's documentation, "Troubleshooting" and "Environment Variables".
    """
    group = log.main
    remarks = [f"a warning of {warning}" for warning in log.warnings[:MOST_SHOWN]]
    if (more := len(log.warnings) - MOST_SHOWN) > 0:
        remarks.append(f"{more} warnings more: search the log for NCCL WARN")
    inside, between = kinds(group, inside=True), kinds(group, inside=False)
    if len({version.split("+")[0] for version in log.versions}) > 1:
        remarks.append(
            f"NCCL has different versions ({log.version}): all ranks of a job need the same; do "
            "all nodes run the same container?"
        )
    late = [number for number, rank in sorted(group.ranks.items()) if not rank.ready]
    if late:
        remarks.append(f"no Init COMPLETE from ranks {_some(late)}: start-up failed or hangs there")
    unseen = [rank for rank in range(group.size) if rank not in group.ranks]
    if unseen:
        remarks.append(
            f"no start-up line from ranks {_some(unseen)}: is this the output of all nodes, or did "
            "they never get that far?"
        )
    if "SHM" in inside:
        remarks.append(
            "GPUs of one node talk through host memory (SHM), not directly (P2P): is "
            "NCCL_P2P_DISABLE set, or does the machine's PCIe not allow it?"
        )
    if "NET/Socket" in between:
        remarks.append(
            "nodes talk over plain TCP (NET/Socket): where there is InfiniBand or RoCE, is its "
            "driver in the container, and is NCCL_IB_DISABLE unset?"
        )
    elif any(kind.startswith("NET") for kind in between) and not any(
        link.gpu_direct for link in group.connections
    ):  # NVLink between nodes (P2P/MNNVL) needs no network card
        remarks.append(
            "no GPUDirect RDMA (no GDRDMA) between nodes: every message is copied through host "
            "memory; is the nvidia-peermem module loaded?"
        )
    return remarks


def kinds(group: Communicator, inside: bool) -> "Counter[str]":
    """How often each kind of transport was connected, inside nodes or between them. A network
    connection, which both of its ends print, counts once."""

    def is_inside(link: Connection) -> bool:  # by the transport, where no host is in the log
        if {link.source, link.target} <= group.ranks.keys():
            return group.same_node(link.source, link.target)
        return not link.kind.startswith("NET") and "MNNVL" not in link.transport

    links = {
        (link.channel, link.source, link.target, link.kind)
        for link in group.connections
        if is_inside(link) == inside
    }
    return Counter(kind for *_, kind in links)


def _ranks(group: Communicator) -> str:
    hosts = [f"{host}: {_some(ranks)}" for host, ranks in group.hosts().items()]
    more = f", and {len(hosts) - MOST_SHOWN} hosts more" if len(hosts) > MOST_SHOWN else ""
    if not group.size:
        return "not said"
    return f"{group.size} ({'; '.join(hosts[:MOST_SHOWN])}{more})"


def _rings(group: Communicator) -> list[tuple[str, str]]:
    """Channels with the same ring share a row."""
    same: dict[tuple[int, ...], list[int]] = {}
    for channel, ring in group.rings.items():
        same.setdefault(ring, []).append(channel)
    return [
        ("ring", f"{_some(ring, ' ')}  (channel {_some(channels)})")
        for ring, channels in islice(same.items(), MOST_SHOWN)
    ]


def _links(group: Communicator, title: str, inside: bool) -> list[tuple[str, str]]:
    counts = kinds(group, inside).most_common()
    return [(title, f"{kind}, {count} connections") for kind, count in counts]


def _some(numbers: "list[int] | tuple[int, ...]", between: str = ", ") -> str:
    shown = between.join(map(str, numbers[:16]))
    return shown + (" ..." if len(numbers) > 16 else "")
