"""One step of a rank as bars in lanes: what a timeline is made of, before it is drawn.

0 ─┬───────────────────────┬───────────────┬───────────
   │ depth 0 and 1         │   waiting     │            the lane of computing
   ├─────────┬─────────────┤               │
1 ─┴─depth 2─┴─────────────┴───────────────┴───────────
      ┌─────────┐  ┌──────┐
      └─────────┘  └──────┘                              lanes of communication
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from labkit.events import CommEvent
from labkit.plot.style import PHASES, UNFINISHED, WAITING, shade
from labkit.trace import RankTrace, Span
from labkit.trace.measures import Intervals, lanes, union, waiting, without

TOPS = (0.0, 0.0, 0.5, 0.78)  # where a span of depth 0, 1, 2, and 3 or more begins in its lane
COMM_HEIGHT, COMM_GAP = 0.55, 0.07
MOST_LANES = 2  # of communication at full height below the first; more of them share this space
RANK_GAP = 0.4
MESSAGES = "messages"


class Bar(NamedTuple):
    """Something with a beginning and an end. Heights count downward from the top of its rank, and
    the lane of computing is 1 high."""

    top: float
    bottom: float
    begin_ms: float
    end_ms: float
    colour: str
    names: tuple[str, ...]  # the first that fits is written in it, between `top` and `names_to`
    names_to: float
    edge: str = ""  # a colour of the outline that is always there
    open: bool = False  # never ended: reaches to the end of the picture
    free_ms: tuple[float, float] | None = None  # the longest part without waits; None: all of it


@dataclass(frozen=True)
class RankBars:
    """The bars of one rank, those in front last."""

    bars: list[Bar]
    groups: list[str]  # of each lane of communication, top down; MESSAGES where it has no others

    @property
    def height(self) -> float:
        lanes = len(self.groups)
        return (lane_place(lanes - 1, lanes)[1] if lanes else 1.0) + RANK_GAP


def lane_place(lane: int, lanes: int) -> tuple[float, float]:
    """Top and bottom of the `lane`-th of so many lanes of communication, from 0."""
    if lane == 0:
        return 1 + COMM_GAP, 1 + COMM_GAP + COMM_HEIGHT
    scale = min(1.0, MOST_LANES / (lanes - 1))
    top = 1 + COMM_GAP + (1 + (lane - 1) * scale) * (COMM_HEIGHT + COMM_GAP)
    return top, top + scale * COMM_HEIGHT


def bars_of(one: RankTrace, end_s: float) -> RankBars:
    """Everything one rank did; what has no end is open until `end_s`."""
    waits = _waits(one, end_s)
    waited_ms = union((bar.begin_ms, bar.end_ms) for bar in waits)
    bars = [bar._replace(free_ms=_free(bar, waited_ms)) for bar in _spans(one, end_s)] + waits
    began = {id(x): max(x.began_s, x.issued_s) for x in one.comms}  # 0.0: not begun, only issued
    closed = [
        x if x.ended_s else replace(x, began_s=began[id(x)], ended_s=end_s) for x in one.comms
    ]
    unfinished = {id(copy) for x, copy in zip(one.comms, closed) if copy is not x}
    found = lanes(closed)
    for lane, (_, events) in enumerate(found):
        place = lane_place(lane, len(found))
        bars += [_comm(one.rank, x, place, id(x) in unfinished) for x in events]
    together = {x.group for x in closed if not _is_message(x)}
    return RankBars(bars, [_row_name(group, group in together) for group, _ in found])


def _is_message(event: CommEvent) -> bool:
    """From one rank to one other."""
    return event.op in ("send", "recv") and event.peer is not None


def _row_name(group: str, together: bool) -> str:
    """Where no operation is of all ranks, their group's name would say that they took part."""
    return group if together or group.partition(" of world ")[0] != "default" else MESSAGES


def _spans(one: RankTrace, end_s: float) -> Iterator[Bar]:
    spans = sorted(one.spans, key=lambda x: (x.began_s, x.depth))
    roots: dict[str, int] = {}  # how deep the root lies: a strategy's wrapper may be around it
    for span in spans:
        if not span.module:
            roots[span.phase] = max(span.depth, roots.get(span.phase, 0))
    for span, following in zip(spans, [*spans[1:], None]):
        ended_s = span.ended_s or end_s
        parent = (
            following is not None and following.depth > span.depth and following.began_s < ended_s
        )
        depth = min(max(0, span.depth - roots.get(span.phase, 0)), len(TOPS) - 1)
        if depth == 0 and parent:
            names: tuple[str, ...] = ()  # its modules are named instead
        else:
            names = _module_names(span)
        names_to = TOPS[min(max(depth, 1) + 1, len(TOPS) - 1)] if parent else 1.0
        yield Bar(
            TOPS[depth], 1.0, span.began_s * 1e3, ended_s * 1e3, PHASES[span.phase], names,
            names_to, UNFINISHED if not span.ended_s else "", not span.ended_s,
        )  # fmt: skip


def _module_names(span: Span) -> tuple[str, ...]:
    """From the whole path to its last part, "blocks.0.mlp.up" to "up"."""
    if not span.module:
        return (span.kind or span.phase,)
    if span.kind == "microbatch":  # of a pipeline: its number
        return (span.module,)
    parts = span.module.split(".")
    return tuple(".".join(parts[i:]) for i in range(len(parts)) if not parts[i].isdigit())


def _free(bar: Bar, waited_ms: Intervals) -> tuple[float, float]:
    """Where its name may stand."""
    over = [x for x in waited_ms if x[0] < bar.end_ms and x[1] > bar.begin_ms]
    left = without([(bar.begin_ms, bar.end_ms)], over)
    return max(left, key=lambda x: x[1] - x[0], default=(bar.begin_ms, bar.begin_ms))


def _waits(one: RankTrace, end_s: float) -> list[Bar]:
    """When it stood still; what it still waits for at the end, from the first of them on."""
    waits = [_wait(begin_s, ended_s, "waiting", False) for begin_s, ended_s in waiting(one)]
    still = [
        _wait(began_s, end_s, f"waiting for {_event_names(x)[0]}", True)
        for x in one.comms
        if not x.ended_s and (x.blocking or x.wait_began_s)
        for began_s in [x.wait_began_s or x.issued_s]  # a blocking one is waited for at once
    ]
    return waits + sorted(still, key=lambda bar: bar.begin_ms)[:1]


def _wait(begin_s: float, end_s: float, name: str, is_open: bool) -> Bar:
    names = tuple(dict.fromkeys([name, "waiting"]))
    return Bar(0.0, 1.0, begin_s * 1e3, end_s * 1e3, WAITING, names, 1.0, UNFINISHED, is_open)


def _comm(rank: int, event: CommEvent, place: tuple[float, float], is_open: bool) -> Bar:
    number = event.seq
    if event.peer is not None and _is_message(event):  # the same on both ends
        number += rank + event.ranks[event.peer] + event.tag
    return Bar(
        *place, event.began_s * 1e3, event.ended_s * 1e3, shade(event.op, number),
        _event_names(event), place[1], UNFINISHED if is_open else "", is_open,
    )  # fmt: skip


def _event_names(event: CommEvent) -> tuple[str, ...]:
    """ "send → 2" with the global rank of the other end; "all_reduce 7" with its number."""
    if event.peer is not None and _is_message(event):
        way = f"{'→' if event.op == 'send' else '←'} {event.ranks[event.peer]}"
        return f"{event.op} {way}", way
    return f"{event.op} {event.seq}", str(event.seq)
