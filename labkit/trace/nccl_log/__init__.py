"""What NCCL says of itself with NCCL_DEBUG=INFO, read into plain data (no torch here).

    NcclLog ── communicators ── Communicator    the ranks of one of torch's process groups
                                  ranks         the host and GPU of each
                                  rings         channel -> the ranks in the order of its ring
                                  trees         channel -> rank -> its parent and its children
                                  connections   source, target, channel and transport

A *channel* is one ring and one tree, with some of the GPU's threads and a share of the bytes: NCCL
runs several at once to fill all links. summary.py makes a table of a log; examples/ has explained
ones, composed after NCCL's documentation.

A line begins with its process, and the lines of all ranks are mixed. Other lines are skipped:

    node0:4100:4131 [2] NCCL INFO Channel 00/0 : 2[2] -> 3[3] via P2P/CUMEM
    host  process thread  CUDA device

The forms here are those of NCCL 2.8 to 2.27. Source: NCCL's documentation, "Environment Variables"
(NCCL_DEBUG), and NCCL's source, which has each line's format (src/debug.cc, src/init.cc,
src/graph/rings.cc, src/transport/).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from labkit.foreign import read_file

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parent / "examples").glob("*.log"))}

LINE = re.compile(
    r"(?P<host>[^\s:\[\]]+):(?P<pid>\d+):(?P<tid>\d+) \[(?P<device>\d+)\] "
    r"(?:(?P<place>\S+:\d+) (?:\(\S+\) )?)?NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
VERSION = re.compile(r"NCCL version (\d[\w.+]*\w)")
INIT = re.compile(
    r"comm (?P<comm>\S+) rank (?P<rank>\d+) n[rR]anks (?P<size>\d{1,6}) cudaDev (?P<device>\d+)"
    r".*? busId (?P<bus>\w+)"
    r"(?: parent (?P<parent>\S+)(?: (?:split|child)Count (?P<nth>\d+))? color (?P<color>-?\d+))?"
    r"(?:.*?commId (?P<id>\w+))?.*Init (?P<state>START|COMPLETE)"
)
NAMES_ITS_COMM = re.compile(r" comm (0x\w+)")
RING = re.compile(r"Channel (\d+)/(\d+) :((?: +\d+)+)\s*$")
CONNECTION = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? : (?P<source>\d+)(?:\[\w+\])? -> "
    r"(?P<target>\d+)(?:\[\w+\])?(?: \[(?P<end>send|receive)\])? via (?P<over>.+?)(?: comm 0x.*)?$"
)
TREE = re.compile(r"\[(\d+)\] (-?\d+)/(-?\d+)/(-?\d+)->(\d+)->(-?\d+)")
CHOSEN = re.compile(r"Using network (\S.*?)\s*$")  # a plugin's name may have spaces
CARDS = re.compile(r"NET/(?:IB|Socket|\w+) ?: Using (\[0\].*)")
SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?$")
COUNT = re.compile(r"(\d+) coll channels")
THRESHOLDS = re.compile(r"threadThresholds (.*)")

Match = re.Match[str]


@dataclass(slots=True)
class NcclRank:
    """One rank of a communicator: a GPU in a process on a host."""

    rank: int
    host: str
    pid: int
    device: int  # the CUDA device in its process
    bus_id: str = ""  # of the GPU on PCI, in hexadecimal: "1d000"
    ready: bool = False  # it has said "Init COMPLETE"


@dataclass(frozen=True, slots=True)
class Connection:
    """`source` sends to `target`. `transport` is NCCL's own text, as "NET/IB/0/GDRDMA"; both ends
    of a network connection say it, so the same one can stand there as "send" and as "receive"."""

    channel: int
    source: int
    target: int
    transport: str
    end: str = ""  # "send" or "receive" over a network, else nothing

    @property
    def kind(self) -> str:
        """The transport without its details: "P2P", "SHM", "NET/IB", "NET/Socket"."""
        parts = self.transport.split("/")
        return "/".join(parts[:2]) if parts[0] == "NET" else parts[0]

    @property
    def gpu_direct(self) -> bool:
        """Whether the network card reads the GPU's memory itself (GPUDirect RDMA)."""
        return "GDRDMA" in self.transport


@dataclass(frozen=True, slots=True)
class TreeNode:
    """The place of a rank in a channel's tree."""

    parent: int | None
    children: tuple[int, ...]


@dataclass
class Communicator:
    """Ranks that talk together. `id` is what NCCL calls commId; for a split one without, whose
    split it is and its color; "" where the log has neither."""

    id: str = ""
    size: int = 0
    ranks: dict[int, NcclRank] = field(default_factory=dict)
    channels: int = 0  # of which the log may not show all
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    trees: dict[int, dict[int, TreeNode]] = field(default_factory=dict)
    connections: list[Connection] = field(default_factory=list)
    thresholds: str = ""  # NCCL's threadThresholds, as it prints them

    @property
    def ready(self) -> bool:
        """Whether all ranks have said "Init COMPLETE"; where not, one of them may hang."""
        return 0 < self.size == sum(rank.ready for rank in self.ranks.values())

    def hosts(self) -> dict[str, list[int]]:
        """host -> its ranks, in ascending order."""
        hosts: dict[str, list[int]] = {}
        for rank in sorted(self.ranks):
            hosts.setdefault(self.ranks[rank].host, []).append(rank)
        return hosts

    def same_node(self, one: int, other: int) -> bool:
        """Whether both are on one host. A rank that the log does not place is on none."""
        both = one in self.ranks and other in self.ranks
        return both and self.ranks[one].host == self.ranks[other].host

    def over(self, source: int, target: int, channel: int | None = None) -> Connection | None:
        """The connection from `source` to `target`, on `channel` if one is given; None where the
        log has none."""
        for link in self.connections:
            if (link.source, link.target) == (source, target) and channel in (None, link.channel):
                return link
        return None

    def hops(self, channel: int) -> Iterator[tuple[int, int]]:
        """(source, target) along the ring of a channel."""
        ring = self.rings[channel]
        return zip(ring, ring[1:] + ring[:1])


@dataclass
class NcclLog:
    """All that a log says. `lines` counts those that NCCL wrote, `understood` those read here."""

    versions: list[str] = field(default_factory=list)  # one, where all is well
    networks: list[str] = field(default_factory=list)  # those chosen: "IB", "Socket", a plugin's
    cards: dict[str, list[str]] = field(default_factory=dict)  # host -> "mlx5_0:1/IB" or "eth0"
    settings: dict[str, str] = field(default_factory=dict)  # NCCL_... variables that are set
    warnings: list[str] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)  # the largest first
    lines: int = 0
    understood: int = 0

    @property
    def version(self) -> str:
        """NCCL's version, "" where the log has none; where ranks differ, all of them."""
        return ", ".join(self.versions)

    @property
    def main(self) -> Communicator:
        """The communicator with most ranks, the one of all where torch made it. Raises ValueError
        where the log has none."""
        if not self.communicators:
            raise ValueError(
                "this log has no communicator; run with NCCL_DEBUG=INFO, and keep all lines "
                "from the first collective on"
            )
        return self.communicators[0]


def read_nccl_log(path: Path | str) -> NcclLog:
    """Read a log from a file. Raises OSError, and ValueError where it is not a regular file."""
    return parse_nccl_log(read_file(path).decode(errors="replace"))


def parse_nccl_log(text: str) -> NcclLog:
    """Read a log from its text; nothing in it is an error."""
    lines = [line for each in text.splitlines() if (line := LINE.search(each))]
    log = NcclLog(list(dict.fromkeys(VERSION.findall(text))), lines=len(lines))
    communicators = _Communicators(lines)
    for line in lines:
        if line["level"] == "WARN":
            place = f" ({line['place']})" if line["place"] else ""
            log.warnings.append(f"{line['host']} [{line['device']}]: {line['text']}{place}")
            log.understood += 1
        else:
            log.understood += _read_process_line(log, line) or communicators.read(line)
    log.communicators = sorted(communicators.by_name.values(), key=lambda group: -group.size)
    return log


def _read_process_line(log: NcclLog, line: Match) -> bool:
    """Read what holds for a whole process; returns whether the line was about that."""
    if found := CHOSEN.search(line["text"]):
        log.networks += [found[1]] if found[1] not in log.networks else []
    elif found := CARDS.search(line["text"]):
        known = log.cards.setdefault(line["host"], [])
        known += [x for x in re.findall(r"\[\d+\]([^\s;<]+)", found[1]) if x not in known]
    elif found := SET.match(line["text"]):
        log.settings[found[1]] = found[2]
    else:
        return bool(VERSION.search(line["text"]))
    return True


class _Communicators:
    """The communicators, and which of them each thread is setting up. Where the log names one at
    most, every line is about that one, also where the log's head is missing."""

    def __init__(self, lines: list[Match]):
        self.by_name: dict[str, Communicator] = {}
        self._name_at: dict[tuple[str, ...], str] = {}  # host, process, pointer
        self._of_thread: dict[tuple[str, ...], str] = {}
        self._of_process: dict[tuple[str, ...], str] = {}  # and device: it may have many
        names = {self._name(line, init) for line in lines if (init := INIT.search(line["text"]))}
        self._only = None if len(names - {""}) > 1 else "".join(names)

    def read(self, line: Match) -> bool:
        """Read a line about a communicator; returns whether it was one."""
        text = line["text"]
        if found := INIT.search(text):
            name = self._name(line, found)
            self._of_thread[line.group("host", "pid", "tid")] = name
            self._of_process[line.group("host", "pid", "device")] = name
            group, rank, device = self._group(line), int(found["rank"]), int(found["device"])
            group.size = int(found["size"])
            new = NcclRank(rank, line["host"], int(line["pid"]), device, found["bus"])
            group.ranks.setdefault(rank, new).ready |= found["state"] == "COMPLETE"
        elif found := RING.match(text):
            group = self._group(line)
            group.channels = int(found[2])
            group.rings[int(found[1])] = tuple(map(int, found[3].split()))
        elif found := CONNECTION.match(text):
            channel, source, target = map(int, found.group("channel", "source", "target"))
            over, end = found["over"].strip(), found["end"] or ""
            self._group(line).connections.append(Connection(channel, source, target, over, end))
        elif found := COUNT.match(text):
            group = self._group(line)
            group.channels = group.channels or int(found[1])
        elif found := THRESHOLDS.match(text):
            self._group(line).thresholds = found[1].strip()
        elif text.startswith("Trees") and (nodes := TREE.findall(text)):
            for node in nodes:
                channel, *children, rank, parent = map(int, node)
                below = tuple(child for child in children if child >= 0)
                place = TreeNode(parent if parent >= 0 else None, below)
                self._group(line).trees.setdefault(channel, {})[rank] = place
        else:
            return False
        return True

    def _group(self, line: Match) -> Communicator:
        """The communicator of a line: the one that it names, else its thread's last, else its
        process's (helper threads set up none themselves)."""
        name = self._only
        if name is None:
            name = self._of_process.get(line.group("host", "pid", "device"), "")
            name = self._of_thread.get(line.group("host", "pid", "tid"), name)
            if named := NAMES_ITS_COMM.search(line["text"]):
                name = self._name_at.get((line["host"], line["pid"], named[1]), name)
        return self.by_name.setdefault(name, Communicator(name))

    def _name(self, line: Match, init: Match) -> str:
        """The commId; where a split communicator has none, its parent, which of the parent's splits
        it is, and its color. (The log gives the parent as a pointer, different in each process.)"""
        host, pid = line["host"], line["pid"]
        name = self._name_at.get((host, pid, init["comm"]), "")
        if name and init["state"] == "COMPLETE":
            return name  # as its START said, whatever this line adds
        if init["id"]:
            name = init["id"]
        elif init["parent"]:
            parent = self._name_at.get((host, pid, init["parent"]), "")
            name = f"{parent} split {init['nth'] or '?'} color {init['color']}".strip()
        self._name_at[host, pid, init["comm"]] = name
        return name
