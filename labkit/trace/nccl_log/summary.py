"""An NCCL log as a table, with remarks on likely problems."""

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from labkit.foreign import markup
from labkit.trace.nccl_log import Communicator, Connection, NcclLog
from labkit.trace.nccl_log.log import alike

MAX_SHOWN = 4  # maximum number of warnings, hosts or rings


def table(log: NcclLog, name: str = "NCCL log") -> Table:
    """Summarize the largest communicator. Raises ValueError if the log has no communicator."""
    group = log.main
    rows = [
        ("NCCL", log.version or "not logged"),
        ("ranks", _ranks(group)),
        ("network", ", ".join(log.networks) or "not logged"),
        *(("cards", f"{host}: {', '.join(cards)}") for host, cards in sorted(log.cards.items())),
        ("channels", str(group.channels or "not logged")),
    ]
    for channels in alike(group.rings)[:MAX_SHOWN]:
        ring = group.rings[channels[0]]
        numbers = f"channel{'s' * (len(channels) > 1)} {_some(channels)}"
        rows.append(("ring", f"{_some(ring, ' ')}  ({numbers})"))
    for title, inside in (("inside nodes", True), ("between nodes", False)):
        for kind, count in kinds(group, inside).most_common():
            rows.append((title, f"{kind}, {count} connections"))
    settings = ", ".join(f"{name}={value}" for name, value in log.settings.items())
    rows.append(("settings", settings or "none logged"))
    if others := [str(other.size) for other in log.communicators[1:]]:
        rows.append(("others", f"{len(others)} communicators, of {', '.join(others)} ranks"))
    rows += [("[red]problem[/]", remark) for remark in remarks(log)]
    shown = Table(show_header=False, title=markup(name), title_justify="left")
    for left, right in rows:
        shown.add_row(left, markup(right))
    return shown


def remarks(log: NcclLog) -> list[str]:
    """One sentence per common cause of slow or failing communication that the log shows.
    Source: NCCL's documentation, "Troubleshooting" and "Environment Variables"."""
    group, more = log.main, len(log.warnings) - MAX_SHOWN
    inside, between = kinds(group, inside=True), kinds(group, inside=False)
    late = [number for number, rank in sorted(group.ranks.items()) if not rank.ready]
    unseen = [rank for rank in range(group.size) if rank not in group.ranks]
    network = any(kind.startswith("NET") for kind in between)  # NVLink between nodes needs no card
    direct = any(link.gpu_direct for link in group.connections)
    sentences = [
        (more > 0, f"{more} more warnings: search the log for NCCL WARN"),
        (
            len({version.split("+")[0] for version in log.versions}) > 1,
            f"ranks use different NCCL versions ({log.version}); all ranks need the same version: "
            "do all nodes run the same container?",
        ),
        (late, f"no Init COMPLETE from ranks {_some(late)}: start-up failed or hangs there"),
        (
            unseen,
            f"no start-up line from ranks {_some(unseen)}: is this the output of all nodes, or did "
            "these ranks fail earlier?",
        ),
        (
            "SHM" in inside,
            "GPUs of one node communicate through host memory (SHM), not directly (P2P): is "
            "NCCL_P2P_DISABLE set, or does the machine not support P2P over PCIe?",
        ),
        (
            "NET/Socket" in between,
            "nodes communicate over plain TCP (NET/Socket): if there is InfiniBand or RoCE, is its "
            "driver in the container, and is NCCL_IB_DISABLE unset?",
        ),
        (
            network and "NET/Socket" not in between and not direct,
            "no GPUDirect RDMA (no GDRDMA) between nodes: every message is copied through host "
            "memory; is the nvidia-peermem module loaded?",
        ),
    ]
    warnings = [f"a warning from {warning}" for warning in log.warnings[:MAX_SHOWN]]
    return warnings + [sentence for applies, sentence in sentences if applies]


def kinds(group: Communicator, inside: bool) -> "Counter[str]":
    """Connection counts per kind of transport. A connection that both ends log is counted once."""

    def is_inside(link: Connection) -> bool:  # by transport if a host is unknown
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
    more = f", and {len(hosts) - MAX_SHOWN} more hosts" if len(hosts) > MAX_SHOWN else ""
    return f"{group.size} ({'; '.join(hosts[:MAX_SHOWN])}{more})" if group.size else "not logged"


def _some(numbers: Sequence[int], between: str = ", ") -> str:
    shown = between.join(map(str, numbers[:16]))
    return shown + (" ..." if len(numbers) > 16 else "")
