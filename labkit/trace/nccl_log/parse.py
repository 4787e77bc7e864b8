"""Parses an NCCL log. Most lines name their process; the lines of all ranks are interleaved:

    node0:4100:4131 [2] NCCL INFO Channel 00/0 : 2[2] -> 3[3] via P2P/CUMEM
    host  process thread  CUDA device

Unrecognized lines are skipped. The patterns fit NCCL 2.8 to 2.27. Sources: NCCL's documentation,
"Environment Variables" (NCCL_DEBUG); NCCL's code (src/debug.cc, src/init.cc,
src/graph/rings.cc, src/transport/).
"""

import re
from pathlib import Path

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
COMM_POINTER = re.compile(r" comm (0x\w+)")
RING = re.compile(r"Channel (\d+)/(\d+) :((?: +\d+)+)\s*$")
CONNECTION = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? : (?P<source>\d+)(?:\[\w+\])? -> "
    r"(?P<target>\d+)(?:\[\w+\])?(?: \[(?P<end>send|receive)\])? via (?P<over>.+?)(?: comm 0x.*)?$"
)
TREE = re.compile(r"\[(\d+)\] (-?\d+)/(-?\d+)/(-?\d+)->(\d+)->(-?\d+)")
CHOSEN = re.compile(r"Using network (\S.*?)\s*$")  # a plugin's name may contain spaces
CARDS = re.compile(r"NET/(?:IB|Socket|\w+) ?: Using (\[0\].*)")
SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.*?)\.?$")
COUNT = re.compile(r"(\d+) coll channels")
THRESHOLDS = re.compile(r"threadThresholds (.*)")

Match = re.Match[str]


def read_nccl_log(path: Path | str) -> NcclLog:
    """Read a log file. Raises OSError, or ValueError if `path` is not a regular file."""
    return parse_nccl_log(read_file(path).decode(errors="replace"))


def parse_nccl_log(text: str) -> NcclLog:
    """Parse the text of a log, skipping unknown lines without an error."""
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
    """Parse a line that concerns a whole process; return whether the line matched."""
    if match := CHOSEN.search(line["text"]):
        log.networks += [match[1]] if match[1] not in log.networks else []
    elif match := CARDS.search(line["text"]):
        known = log.cards.setdefault(line["host"], [])
        known += [x for x in re.findall(r"\[\d+\]([^\s;<]+)", match[1]) if x not in known]
    elif match := SET.match(line["text"]):
        log.settings[match[1]] = match[2]
    else:
        return bool(VERSION.search(line["text"]))
    return True


class _Communicators:
    """The communicators, and which communicator each thread is setting up. If the log names at most
    one communicator, every line belongs to it, even if the start-up lines are missing."""

    def __init__(self, lines: list[Match]):
        self.by_name: dict[str, Communicator] = {}
        self._name_at: dict[tuple[str, ...], str] = {}  # host, process, pointer
        self._of_thread: dict[tuple[str, ...], str] = {}
        self._of_process: dict[tuple[str, ...], str] = {}  # host, process, device
        names = {self._name(line, init) for line in lines if (init := INIT.search(line["text"]))}
        self._only = None if len(names - {""}) > 1 else "".join(names)

    def read(self, line: Match) -> bool:
        """Parse a line that concerns a communicator; return whether the line matched."""
        text = line["text"]
        if match := INIT.search(text):
            name = self._name(line, match)
            self._of_thread[line.group("host", "pid", "tid")] = name
            self._of_process[line.group("host", "pid", "device")] = name
            group, rank, device = self._group(line), int(match["rank"]), int(match["device"])
            group.size = int(match["size"])
            new = NcclRank(rank, line["host"], int(line["pid"]), device, match["bus"])
            group.ranks.setdefault(rank, new).ready |= match["state"] == "COMPLETE"
        elif match := RING.match(text):
            group = self._group(line)
            group.channels = int(match[2])
            group.rings[int(match[1])] = tuple(map(int, match[3].split()))
        elif match := CONNECTION.match(text):
            channel, source, target = map(int, match.group("channel", "source", "target"))
            over, end = match["over"].strip(), match["end"] or ""
            self._group(line).connections.append(Connection(channel, source, target, over, end))
        elif match := COUNT.match(text):
            group = self._group(line)
            group.channels = group.channels or int(match[1])
        elif match := THRESHOLDS.match(text):
            self._group(line).thresholds = match[1].strip()
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
        """The communicator that the line names, or else the latest of its thread or process."""
        name = self._only
        if name is None:
            name = self._of_process.get(line.group("host", "pid", "device"), "")
            name = self._of_thread.get(line.group("host", "pid", "tid"), name)
            if named := COMM_POINTER.search(line["text"]):
                name = self._name_at.get((line["host"], line["pid"], named[1]), name)
        return self.by_name.setdefault(name, Communicator(name))

    def _name(self, line: Match, init: Match) -> str:
        """The commId; for a split without a commId, the parent's name, split number and color.
        (The log identifies the parent by a pointer, which differs between processes.)"""
        host, pid = line["host"], line["pid"]
        name = self._name_at.get((host, pid, init["comm"]), "")
        if name and init["state"] == "COMPLETE":
            return name  # the name from the START line, whatever this line adds
        if init["id"]:
            name = init["id"]
        elif init["parent"]:
            parent = self._name_at.get((host, pid, init["parent"]), "")
            name = f"{parent} split {init['nth'] or '?'} color {init['color']}".strip()
        self._name_at[host, pid, init["comm"]] = name
        return name
