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

from labkit.nccl_log.log import Communicator, Connection, NcclLog, NcclRank, TreeNode

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parent / "examples").glob("*.log"))}

LINE = re.compile(
    r"(?P<host>[^\s:\[\]]+):(?P<pid>\d+):(?P<tid>\d+) \[(?P<device>\d+)\] "
    r"(?:(?P<place>\S+:\d+) (?:\(\S+\) )?)?NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
VERSION = re.compile(r"NCCL version (\S+)")
INIT = re.compile(
    r"comm (?P<comm>\S+) rank (?P<rank>\d+) n[rR]anks (?P<size>\d+) cudaDev (?P<device>\d+)"
    r".*? busId (?P<bus>\w+)(?:.*?commId (?P<id>\w+))?.*Init (?P<state>START|COMPLETE)"
)
RING = re.compile(r"Channel (\d+)/(\d+) :((?: +\d+)+)\s*$")
CONNECTION = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? : (?P<source>\d+)(?:\[\w+\])? -> "
    r"(?P<target>\d+)(?:\[\w+\])?(?: \[(?P<end>send|receive)\])? via (?P<over>.+?)(?: comm 0x.*)?$"
)
TREE = re.compile(r"\[(\d+)\] (-?\d+)/(-?\d+)/(-?\d+)->(\d+)->(-?\d+)")
CHOSEN = re.compile(r"Using network (\S+)")
CARDS = re.compile(r"NET/(?:IB|Socket|\w+) ?: Using (\[0\].*)")
SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?$")
COUNT = re.compile(r"(\d+) coll channels")
THRESHOLDS = re.compile(r"threadThresholds (.*)")

Who = tuple[str, int, int]  # host, process, device


def read_nccl_log(path: Path | str) -> NcclLog:
    """Read a log from a file. Raises OSError where it cannot be read."""
    return parse_nccl_log(Path(path).read_text(encoding="utf-8", errors="replace"))


def parse_nccl_log(text: str) -> NcclLog:
    """Read a log from its text; nothing in it is an error."""
    log = NcclLog()
    groups = _Groups(text)
    for line in text.splitlines():
        if found := VERSION.search(line):
            log.version = found[1]
        if (found := LINE.search(line)) is None:
            continue
        log.lines += 1
        who = found["host"], int(found["pid"]), int(found["device"])
        if found["level"] == "WARN":
            place = f" ({found['place']})" if found["place"] else ""
            log.warnings.append(f"{found['host']} [{found['device']}]: {found['text']}{place}")
            log.understood += 1
        else:
            log.understood += _of_all(log, who, found["text"]) or groups.hear(who, found["text"])
    log.communicators = sorted(groups.every.values(), key=lambda one: -one.size)
    return log


def _of_all(log: NcclLog, who: Who, text: str) -> bool:
    """What holds for the process as a whole; whether the line was such a one."""
    if found := CHOSEN.search(text):
        if found[1] not in log.networks:
            log.networks.append(found[1])
    elif found := CARDS.search(text):
        cards = re.findall(r"\[\d+\]([^\s;<]+)", found[1])
        own = log.cards.setdefault(who[0], [])
        own += [card for card in cards if card not in own]
    elif found := SET.match(text):
        log.settings[found[1]] = found[2]
    else:
        return bool(VERSION.search(text))
    return True


class _Groups:
    """The communicators, and which of them each process is setting up. Where the log names one at
    most, every line is about that one, also where the log's head is missing."""

    def __init__(self, text: str):
        ids = {found["id"] or "" for found in INIT.finditer(text)} - {""}
        self._only = None if len(ids) > 1 else "".join(ids)
        self._now: dict[Who, str] = {}
        self.every: dict[str, Communicator] = {}

    def hear(self, who: Who, text: str) -> bool:
        """Take in a line about a communicator; whether it was such a one."""
        if found := INIT.search(text):
            self._now[who] = found["id"] or ""
            self._init(self._group(who), who, found)
            return True
        readers: list[tuple[re.Pattern[str], Callable[[Communicator, re.Match[str]], None]]] = [
            (RING, _ring), (CONNECTION, _connection), (COUNT, _count), (THRESHOLDS, _thresholds),
        ]  # fmt: skip
        for pattern, read in readers:
            if found := pattern.match(text):
                read(self._group(who), found)
                return True
        nodes = TREE.findall(text) if text.startswith("Trees") else []
        for node in nodes:
            channel, *children, rank, parent = map(int, node)
            below = tuple(child for child in children if child >= 0)
            above = parent if parent >= 0 else None
            self._group(who).trees.setdefault(channel, {})[rank] = TreeNode(above, below)
        return bool(nodes)

    def _group(self, who: Who) -> Communicator:
        name = self._now.get(who, "") if self._only is None else self._only
        return self.every.setdefault(name, Communicator(name))

    @staticmethod
    def _init(group: Communicator, who: Who, found: "re.Match[str]") -> None:
        rank = int(found["rank"])
        group.size = int(found["size"])
        new = NcclRank(rank, who[0], who[1], int(found["device"]), found["bus"])
        group.ranks.setdefault(rank, new).ready |= found["state"] == "COMPLETE"


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
