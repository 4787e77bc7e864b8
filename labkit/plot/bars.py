"""Timeline contents: each rank's bars in lanes, the legend, and the title.

0 ─┬───────────────────────┬───────────────┬───────────
   │ depth 0 and 1         │   waiting     │            compute lane
   ├─────────┬─────────────┤               │
1 ─┴─depth 2─┴─────────────┴───────────────┴───────────
      ┌─────────┐  ┌──────┐
      └─────────┘  └──────┘                              communication lanes
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from matplotlib.patches import Patch

from labkit.events import CommEvent
from labkit.foreign import literal
from labkit.plot.style import PAPER, PHASES, UNFINISHED, WAITING, in_order, shade
from labkit.trace import RankTrace, Span, Trace
from labkit.trace.measures import Intervals, end_of, lanes, overlap, union, waiting, without

TOPS = (0.0, 0.0, 0.5, 0.78)  # top of a span in its lane by depth: 0, 1, 2, 3 or more
COMM_HEIGHT, COMM_GAP = 0.55, 0.07
MOST_LANES = 2  # full-height communication lanes below the first; more lanes share this space
RANK_GAP = 0.4


class Bar(NamedTuple):
    """An interval to draw; `top` and `bottom` are measured downward from the rank's top; the unit
    is the height of the compute lane. Open bars and waits get a vermilion outline."""

    top: float
    bottom: float
    begin_ms: float
    end_ms: float
    open: bool  # never ended: extends to the end of the picture
    color: str
    names: tuple[str, ...]  # the first name that fits is written between `top` and `names_to`
    names_to: float
    free_ms: tuple[float, float] | None = None  # longest interval without waits; None: whole bar


class RankBars(NamedTuple):
    """The bars of one rank, back to front."""

    bars: list[Bar]
    groups: list[str]  # one per lane, top to bottom; "messages": a lane of only send and recv

    @property
    def height(self) -> float:
        lanes = len(self.groups)
        return (lane_place(lanes - 1, lanes)[1] if lanes else 1.0) + RANK_GAP


def lane_place(lane: int, lanes: int) -> tuple[float, float]:
    """Top and bottom of communication lane `lane` (counted from 0) out of `lanes`."""
    if lane == 0:
        return 1 + COMM_GAP, 1 + COMM_GAP + COMM_HEIGHT
    scale = min(1.0, MOST_LANES / (lanes - 1))
    top = 1 + COMM_GAP + (1 + (lane - 1) * scale) * (COMM_HEIGHT + COMM_GAP)
    return top, top + scale * COMM_HEIGHT


def bars_of(rank: RankTrace, end_s: float) -> RankBars:
    """All bars of a rank; bars of unfinished records are open and extend to `end_s`."""
    waits = list(_waits(rank, end_s))
    waited_ms = union((bar.begin_ms, bar.end_ms) for bar in waits)
    bars = [bar._replace(free_ms=_free(bar, waited_ms)) for bar in _spans(rank, end_s)] + waits
    comms = [  # began_s is 0.0 if the operation was only issued
        x if x.ended_s else replace(x, began_s=max(x.began_s, x.issued_s), ended_s=inf)
        for x in rank.comms
    ]
    in_lanes = lanes(comms)
    for lane, (_, events) in enumerate(in_lanes):
        top, bottom = lane_place(lane, len(in_lanes))
        for event in events:
            number = event.seq
            if event.peer is not None and _is_message(event):  # same color on sender and receiver
                number += rank.rank + event.ranks[event.peer] + event.tag
            when = _when(event.began_s, event.ended_s, end_s)
            color = shade(event.op, number)
            bars.append(Bar(top, bottom, *when, color, _event_names(event), bottom))
    collective = {x.group for x in comms if not _is_message(x)}
    # A lane with only messages must not be labeled "all ranks".
    groups = [
        "messages" if group not in collective and _is_default(group) else group
        for group, _ in in_lanes
    ]
    return RankBars(bars, groups)


def _when(begin_s: float, ended_s: float, end_s: float) -> tuple[float, float, bool]:
    """Begin and end in ms, and whether the interval is open (ends at infinity)."""
    return begin_s * 1e3, min(ended_s, end_s) * 1e3, ended_s == inf


def _is_message(event: CommEvent) -> bool:
    return event.op in ("send", "recv") and event.peer is not None


def _is_default(group: str) -> bool:
    return group.partition(" of world ")[0] == "default"


def _spans(rank: RankTrace, end_s: float) -> Iterator[Bar]:
    spans = sorted(rank.spans, key=lambda x: (x.began_s, x.depth))
    roots: dict[str, int] = {}  # depth of the root module, which a strategy may wrap
    for span in spans:
        if not span.module:
            roots[span.phase] = max(span.depth, roots.get(span.phase, 0))
    for span, following in zip(spans, [*spans[1:], None]):
        when = _when(span.began_s, span.ended_s or inf, end_s)
        parent = (
            following is not None
            and following.depth > span.depth
            and following.began_s < (span.ended_s or end_s)
        )
        depth = min(max(0, span.depth - roots.get(span.phase, 0)), len(TOPS) - 1)
        names = () if depth == 0 and parent else _module_names(span)  # children have names
        names_to = TOPS[min(max(depth, 1) + 1, len(TOPS) - 1)] if parent else 1.0
        yield Bar(TOPS[depth], 1.0, *when, PHASES[span.phase], names, names_to)


def _module_names(span: Span) -> tuple[str, ...]:
    """The path and its suffixes: for "blocks.0.mlp.up" also "mlp.up" and "up"."""
    if not span.module:
        return (span.kind or span.phase,)
    if span.kind == "microbatch":  # in a pipeline: the micro-batch
        return (span.module,)
    parts = span.module.split(".")
    return tuple(".".join(parts[i:]) for i in range(len(parts)) if not parts[i].isdigit())


def _free(bar: Bar, waited_ms: Intervals) -> tuple[float, float]:
    """The longest interval without waits, where a name fits best."""
    left = without([(bar.begin_ms, bar.end_ms)], waited_ms)
    return max(left, key=lambda x: x[1] - x[0], default=(bar.begin_ms, bar.begin_ms))


def _waits(rank: RankTrace, end_s: float) -> Iterator[Bar]:
    """The waits of a rank, and its first unfinished wait as an open bar."""
    waits = [(begin_s, ended_s, ("waiting",)) for begin_s, ended_s in waiting(rank)]
    pending = [
        (x.wait_began_s or x.issued_s, inf, (f"waiting for {_event_names(x)[0]}", "waiting"))
        for x in rank.comms
        if not x.ended_s and (x.blocking or x.wait_began_s)  # blocking: waits immediately
    ]
    for begin_s, ended_s, names in [*waits, *sorted(pending, key=lambda wait: wait[0])[:1]]:
        yield Bar(0.0, 1.0, *_when(begin_s, ended_s, end_s), WAITING, names, 1.0)


def _event_names(event: CommEvent) -> tuple[str, ...]:
    """ "send → 2" with the peer's global rank; "all_reduce 7" with the sequence number."""
    if event.peer is not None and _is_message(event):
        arrow = f"{'→' if event.op == 'send' else '←'} {event.ranks[event.peer]}"
        return f"{event.op} {arrow}", arrow
    return f"{event.op} {event.seq}", str(event.seq)


def legend_entries(trace: Trace) -> dict[str, Any]:
    """Entries for the phases, operations and waits in this trace."""
    ranks = trace.ranks.values()
    phases = {x.phase for rank in ranks for x in rank.spans}
    entries: dict[str, Any] = {
        {"user": "other code"}.get(phase, phase): Patch(facecolor=color)
        for phase, color in PHASES.items()
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
    """Whether any record never ended."""
    return any(not x.ended_s for rank in trace.ranks.values() for x in rank.timed_records())


def title_of(part: Trace, step: int | None, ranks: Sequence[int], steps: int) -> str:
    """The title: step, number of ranks, duration, and share of hidden communication."""
    shown = Trace({rank: part.ranks[rank] for rank in ranks})
    traces = shown.ranks.values()
    last_ms = end_of(part) * 1e3
    last = f"{last_ms:,.0f} ms" if last_ms >= 100 else f"{last_ms:.3g} ms"
    of = f"{len(ranks)} of " if len(ranks) < part.size else ""
    alike = ""
    if any(x.alike for x in traces):  # a rank that represents identical ranks
        alike = ", all alike" if len(ranks) == 1 else ", the others alike"
    where, link = part.about.get("replayed"), part.about.get("link")
    has_comms = any(x.ended_s > x.began_s for rank in traces for x in rank.comms)
    behind = "" if where else " behind compute"  # room is limited
    words = (
        "The whole run" if step is None else f"Step {step}" * (steps > 1),
        f"{of}{part.size} rank{'s' * (part.size != 1)}{alike}",
        "unfinished after " * unfinished(part) + last,
        f"{overlap(shown):.0%} of communication hidden{behind}"
        * (has_comms and any(x.spans for x in traces)),
        where and f"replayed on {literal(str(where))}",
        link and f"paced to {speed_of(link)}",
    )
    return "  ·  ".join(filter(None, words))


def speed_of(link: Mapping[str, Any]) -> str:
    """The speed of a link as text; a link with two levels has two speeds."""
    if "inside" not in link:
        return f"{link['gbps']:g} Gbit/s"
    return f"{speed_of(link['inside'])} inside nodes, {speed_of(link['between'])} between"


def group_name(group: str) -> str:
    """Shorten a communicator's name, such as "default" or "3 (ranks 0, 2)", for a narrow margin."""
    if _is_default(group):
        return "all ranks"
    name = group.partition(" of world ")[0]
    name = name[name.find("(") + 1 :].removesuffix(")")
    return name if len(name) <= 16 else name[:14].rstrip(", ") + " …"
