"""A log of NCCL, line by line, into `NcclLog`.

A line begins with who wrote it, and the lines of all ranks are mixed:

    node0:4100:4131 [2] NCCL INFO Channel 00/0 : 2[2] -> 3[3] via P2P/CUMEM
    host  process thread  CUDA device

What is not understood is passed over: each version words some lines in its own way. The forms
here are those of NCCL 2.8 to 2.27. Source: NCCL's documentation, "Environment Variables"
(NCCL_DEBUG), and NCCL's source, where each line's format stands (src/debug.cc, src/init.cc,
src/graph/rings.cc, src/transport/).
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from labkit.foreign import read_file
from labkit.trace.nccl_log.log import Communicator, Connection, NcclLog, NcclRank, TreeNode

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


class Who(NamedTuple):
    """Who wrote a line."""

    host: str
    pid: int
    tid: int
    device: int


def read_nccl_log(path: Path | str) -> NcclLog:
    """Read a log from a file. Raises OSError, and ValueError where it is not a regular file."""
    return parse_nccl_log(read_file(path).decode(errors="replace"))


def parse_nccl_log(text: str) -> NcclLog:
    """Read a log from its text; nothing in it is an error."""
    log = NcclLog()
    groups = _Groups(text)
    for line in text.splitlines():
        if (found := VERSION.search(line)) and found[1] not in log.versions:
            log.versions.append(found[1])
        if (found := LINE.search(line)) is None:
            continue
        log.lines += 1
        who = _who(found)
        if found["level"] == "WARN":
            place = f" ({found['place']})" if found["place"] else ""
            log.warnings.append(f"{found['host']} [{found['device']}]: {found['text']}{place}")
            log.understood += 1
        else:
            log.understood += _of_all(log, who, found["text"]) or groups.hear(who, found["text"])
    log.communicators = sorted(groups.every.values(), key=lambda one: -one.size)
    return log


def _who(found: "re.Match[str]") -> Who:
    return Who(found["host"], *(int(found[name]) for name in ("pid", "tid", "device")))


def _of_all(log: NcclLog, who: Who, text: str) -> bool:
    """What holds for the process as a whole; whether the line was such a one."""
    if found := CHOSEN.search(text):
        if found[1] not in log.networks:
            log.networks.append(found[1])
    elif found := CARDS.search(text):
        cards = re.findall(r"\[\d+\]([^\s;<]+)", found[1])
        own = log.cards.setdefault(who.host, [])
        own += [card for card in cards if card not in own]
    elif found := SET.match(text):
        log.settings[found[1]] = found[2]
    else:
        return bool(VERSION.search(text))
    return True


class _Groups:
    """The communicators, and which of them each thread is setting up. Where the log names one at
    most, every line is about that one, also where the log's head is missing."""

    def __init__(self, text: str):
        self._names = _Names()
        lines = [found for line in text.splitlines() if (found := LINE.search(line))]
        inits = [(_who(line), found) for line in lines if (found := INIT.search(line["text"]))]
        names = {self._names.of(who, found) for who, found in inits} - {""}
        self._only = None if len(names) > 1 else "".join(names)
        self._of_thread: dict[tuple[str, int, int], str] = {}
        self._of_process: dict[tuple[str, int, int], str] = {}  # with the device: it may have many
        self.every: dict[str, Communicator] = {}

    def hear(self, who: Who, text: str) -> bool:
        """Take in a line about a communicator; whether it was such a one."""
        if found := INIT.search(text):
            name = self._names.of(who, found)
            self._of_thread[who.host, who.pid, who.tid] = name
            self._of_process[who.host, who.pid, who.device] = name
            self._init(self._group(who, text), who, found)
            return True
        readers: list[tuple[re.Pattern[str], Callable[[Communicator, re.Match[str]], None]]] = [
            (RING, _ring), (CONNECTION, _connection), (COUNT, _count), (THRESHOLDS, _thresholds),
        ]  # fmt: skip
        for pattern, read in readers:
            if found := pattern.match(text):
                read(self._group(who, text), found)
                return True
        nodes = TREE.findall(text) if text.startswith("Trees") else []
        for node in nodes:
            channel, *children, rank, parent = map(int, node)
            below = tuple(child for child in children if child >= 0)
            above = parent if parent >= 0 else None
            self._group(who, text).trees.setdefault(channel, {})[rank] = TreeNode(above, below)
        return bool(nodes)

    def _group(self, who: Who, text: str) -> Communicator:
        """The communicator of a line: the one that it names, else its thread's last, else its
        process's (helper threads set up none themselves)."""
        name = self._only
        if name is None:
            by_process = self._of_process.get((who.host, who.pid, who.device), "")
            by_thread = self._of_thread.get((who.host, who.pid, who.tid), by_process)
            named = NAMES_ITS_COMM.search(text)
            name = self._names.at(who, named[1], by_thread) if named else by_thread
        return self.every.setdefault(name, Communicator(name))

    @staticmethod
    def _init(group: Communicator, who: Who, found: "re.Match[str]") -> None:
        rank = int(found["rank"])
        group.size = int(found["size"])
        new = NcclRank(rank, who.host, who.pid, int(found["device"]), found["bus"])
        group.ranks.setdefault(rank, new).ready |= found["state"] == "COMPLETE"


class _Names:
    """What tells communicators apart: commId; where a split one has none, its parent, which of the
    parent's splits it is, and its color. The log gives the parent as a pointer, which each process
    has another of."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, int, str], str] = {}  # host, process, pointer -> name

    def at(self, who: Who, pointer: str, otherwise: str = "") -> str:
        return self._at.get((who.host, who.pid, pointer), otherwise)

    def of(self, who: Who, init: "re.Match[str]") -> str:
        """The name of the communicator that a line is about which says START or COMPLETE."""
        known = self.at(who, init["comm"])
        if known and init["state"] == "COMPLETE":
            name = known  # as its START said, whatever this line adds
        elif init["id"]:
            name = init["id"]
        elif init["parent"]:
            parent = self.at(who, init["parent"])
            name = f"{parent} split {init['nth'] or '?'} color {init['color']}".strip()
        else:
            name = known
        self._at[who.host, who.pid, init["comm"]] = name
        return name


def _ring(group: Communicator, found: "re.Match[str]") -> None:
    group.channels = int(found[2])
    group.rings[int(found[1])] = tuple(map(int, found[3].split()))


def _connection(group: Communicator, found: "re.Match[str]") -> None:
    channel, source, target = (int(found[name]) for name in ("channel", "source", "target"))
    over, end = found["over"].strip(), found["end"] or ""
    group.connections.append(Connection(channel, source, target, over, end))


def _count(group: Communicator, found: "re.Match[str]") -> None:
    group.channels = group.channels or int(found[1])


def _thresholds(group: Communicator, found: "re.Match[str]") -> None:
    group.thresholds = found[1].strip()
