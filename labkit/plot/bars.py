"""What a timeline shows, before it is drawn: the bars of each rank in lanes, legend and title.

0 ─┬───────────────────────┬───────────────┬───────────
   │ depth 0 and 1         │   waiting     │            the lane of computing
   ├─────────┬─────────────┤               │
1 ─┴─depth 2─┴─────────────┴───────────────┴───────────
      ┌─────────┐  ┌──────┐
      └─────────┘  └──────┘                              lanes of communication
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from matplotlib.patches import Patch

from labkit.events import CommEvent
from labkit.foreign import literal
from labkit.plot.style import PAPER, PHASES, UNFINISHED, WAITING, in_order, shade
from labkit.trace import RankTrace, Span, Trace
from labkit.trace.measures import Intervals, end_of, lanes, overlap, union, waiting, without

TOPS = (0.0, 0.0, 0.5, 0.78)  # where a span of depth 0, 1, 2, and 3 or more begins in its lane
COMM_HEIGHT, COMM_GAP = 0.55, 0.07
MOST_LANES = 2  # of communication at full height below the first; more share this space
RANK_GAP = 0.4
MESSAGES = "messages"


class Bar(NamedTuple):
    """An interval to be drawn. Heights count downward from the top of its rank, and the lane of
    computing is 1 high."""

    top: float
    bottom: float
    begin_ms: float
    end_ms: float
    colour: str
    names: tuple[str, ...]  # the first that fits is written between `top` and `names_to`
    names_to: float
    edge: str = ""  # colour of an outline that is always drawn
    open: bool = False  # never ended: reaches to the end of the picture
    free_ms: tuple[float, float] | None = None  # the longest part without waits; None: all of it


@dataclass(frozen=True)
class RankBars:
    """The bars of one rank, those in front last."""

    bars: list[Bar]
    groups: list[str]  # of each lane of communication, from the top; MESSAGES for a lane of those

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


def bars_of(rank: RankTrace, end_s: float) -> RankBars:
    """All that a rank did; what never ended is open until `end_s`."""
    waits = _waits(rank, end_s)
    waited_ms = union((bar.begin_ms, bar.end_ms) for bar in waits)
    bars = [bar._replace(free_ms=_free(bar, waited_ms)) for bar in _spans(rank, end_s)] + waits
    closed = [  # an event with begin 0.0 was only issued
        x if x.ended_s else replace(x, began_s=max(x.began_s, x.issued_s), ended_s=end_s)
        for x in rank.comms
    ]
    still_open = {id(copy) for x, copy in zip(rank.comms, closed) if copy is not x}
    in_lanes = lanes(closed)
    for lane, (_, events) in enumerate(in_lanes):
        place = lane_place(lane, len(in_lanes))
        bars += [_comm(rank.rank, x, place, id(x) in still_open) for x in events]
    collective = {x.group for x in closed if not _is_message(x)}
    # A lane of messages alone must not be called "all ranks".
    groups = [
        MESSAGES if group not in collective and _is_default(group) else group
        for group, _ in in_lanes
    ]
    return RankBars(bars, groups)


def _is_message(event: CommEvent) -> bool:
    """From one rank to one other."""
    return event.op in ("send", "recv") and event.peer is not None


def _is_default(group: str) -> bool:
    return group.partition(" of world ")[0] == "default"


def _spans(rank: RankTrace, end_s: float) -> Iterator[Bar]:
    spans = sorted(rank.spans, key=lambda x: (x.began_s, x.depth))
    roots: dict[str, int] = {}  # depth of the root module: a strategy may wrap it
    for span in spans:
        if not span.module:
            roots[span.phase] = max(span.depth, roots.get(span.phase, 0))
    for span, following in zip(spans, [*spans[1:], None]):
        ended_s = span.ended_s or end_s
        parent = (
            following is not None and following.depth > span.depth and following.began_s < ended_s
        )
        depth = min(max(0, span.depth - roots.get(span.phase, 0)), len(TOPS) - 1)
        names = () if depth == 0 and parent else _module_names(span)  # else those inside are named
        names_to = TOPS[min(max(depth, 1) + 1, len(TOPS) - 1)] if parent else 1.0
        yield Bar(
            TOPS[depth], 1.0, span.began_s * 1e3, ended_s * 1e3, PHASES[span.phase], names,
            names_to, UNFINISHED if not span.ended_s else "", not span.ended_s,
        )  # fmt: skip


def _module_names(span: Span) -> tuple[str, ...]:
    """From the whole path to the last part, "blocks.0.mlp.up" to "up"."""
    if not span.module:
        return (span.kind or span.phase,)
    if span.kind == "microbatch":  # of a pipeline: a number
        return (span.module,)
    parts = span.module.split(".")
    return tuple(".".join(parts[i:]) for i in range(len(parts)) if not parts[i].isdigit())


def _free(bar: Bar, waited_ms: Intervals) -> tuple[float, float]:
    """The longest part without waits, where a name can be read."""
    over = [x for x in waited_ms if x[0] < bar.end_ms and x[1] > bar.begin_ms]
    left = without([(bar.begin_ms, bar.end_ms)], over)
    return max(left, key=lambda x: x[1] - x[0], default=(bar.begin_ms, bar.begin_ms))


def _waits(rank: RankTrace, end_s: float) -> list[Bar]:
    """When the rank waited; the first wait that has not ended is open."""
    waits = [_wait(begin_s, ended_s, "waiting", False) for begin_s, ended_s in waiting(rank)]
    still = [
        _wait(x.wait_began_s or x.issued_s, end_s, f"waiting for {_event_names(x)[0]}", True)
        for x in rank.comms
        if not x.ended_s and (x.blocking or x.wait_began_s)  # a blocking one waits at once
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
        arrow = f"{'→' if event.op == 'send' else '←'} {event.ranks[event.peer]}"
        return f"{event.op} {arrow}", arrow
    return f"{event.op} {event.seq}", str(event.seq)


def legend_entries(trace: Trace) -> dict[str, Any]:
    """The phases, operations and waits that this trace has."""
    ranks = trace.ranks.values()
    phases = {x.phase for rank in ranks for x in rank.spans}
    entries: dict[str, Any] = {
        {"user": "other code"}.get(phase, phase): Patch(facecolor=colour)
        for phase, colour in PHASES.items()
        if phase in phases
    }
    if unfinished(trace) or any(e > b for rank in ranks for b, e in waiting(rank)):
        entries["waiting"] = Patch(facecolor=WAITING, edgecolor=UNFINISHED)
    for op in in_order(x.op for rank in ranks for x in rank.comms):
        name = "send, recv" if op in ("send", "recv") else op
        entries[literal(name)] = tuple(Patch(facecolor=shade(op, number)) for number in (0, 1))
    if unfinished(trace):
        entries["never ended"] = Patch(facecolor=PAPER, edgecolor=UNFINISHED, linewidth=1.6)
    return entries


def unfinished(trace: Trace) -> bool:
    """Whether anything never ended."""
    return any(not x.ended_s for rank in trace.ranks.values() for x in rank.things())


def title_of(part: Trace, step: int | None, ranks: Sequence[int], steps: int) -> str:
    """Which of the run's `steps`, how many ranks, how long, and how much communication was hidden
    behind computing."""
    shown = Trace({rank: part.ranks[rank] for rank in ranks})
    traces = shown.ranks.values()
    last_ms = end_of(part) * 1e3
    last = f"{last_ms:,.0f} ms" if last_ms >= 100 else f"{last_ms:.3g} ms"
    of = f"{len(ranks)} of " if len(ranks) < part.size else ""
    alike = ""
    if any(x.alike for x in traces):  # a rank that represents others
        alike = ", all alike" if len(ranks) == 1 else ", the others alike"
    where = part.about.get("replayed")
    words = ["The whole run"] if step is None else [f"Step {step}"] * (steps > 1)
    words += [
        f"{of}{part.size} rank{'s' * (part.size != 1)}{alike}",
        f"unfinished after {last}" if unfinished(part) else last,
    ]
    if any(x.ended_s for rank in traces for x in rank.comms) and any(x.spans for x in traces):
        behind = "" if where else " behind computing"  # there is only so much room
        words.append(f"{overlap(shown):.0%} of communication hidden{behind}")
    if where:
        words.append(f"replayed on {literal(str(where))}")
    if link := part.about.get("link"):
        words.append(f"paced to {speed_of(link)}")
    return "  ·  ".join(words)


def speed_of(link: Mapping[str, Any]) -> str:
    """A link of one level or of two, in words."""
    if "inside" not in link:
        return f"{link['gbps']:g} Gbit/s"
    return f"{speed_of(link['inside'])} inside nodes, {speed_of(link['between'])} between"


def group_name(group: str) -> str:
    """ "default" and "3 (ranks 0, 2)", as communicators call them, for a narrow margin."""
    if _is_default(group):
        return "all ranks"
    name = group.partition(" of world ")[0]
    name = name[name.find("(") + 1 :].removesuffix(")")
    return name if len(name) <= 16 else name[:14].rstrip(", ") + " …"
