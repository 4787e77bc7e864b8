"""What stands around the bars of a timeline: axes, legend, title, names of groups."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from labkit.foreign import literal
from labkit.plot.style import (
    FAINT,
    INK,
    MUTED,
    PAPER,
    PHASES,
    SMALL_PT,
    UNFINISHED,
    WAITING,
    WIDTH_IN,
    in_order,
    shade,
)
from labkit.trace import Trace
from labkit.trace.measures import end_of, overlap, waiting

LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 1.15, 0.2, 0.4, 0.85  # around the axes


def new_axes(figure: Figure) -> Axes:
    """Axes with room for the names of ranks and the legend, whatever the figure's size."""
    width_in, height_in = (side / figure.dpi for side in figure.bbox.size)
    place = (
        LEFT_IN / width_in,
        BOTTOM_IN / height_in,
        1 - (LEFT_IN + RIGHT_IN) / width_in,
        1 - (TOP_IN + BOTTOM_IN) / height_in,
    )
    axes = figure.add_axes(place)
    axes.spines["left"].set_visible(False)
    axes.set_axisbelow(True)
    axes.set_yticks([])
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.tick_params(axis="x", labelsize=SMALL_PT, labelcolor=INK, color=MUTED)
    return axes


def legend_entries(trace: Trace) -> dict[str, Any]:
    """Of what is drawn of this trace, and of nothing else."""
    ranks = trace.ranks.values()
    phases = {x.phase for one in ranks for x in one.spans}
    ops = {x.op for one in ranks for x in one.comms}
    entries: dict[str, Any] = {
        {"user": "other code"}.get(phase, phase): Patch(facecolor=colour)
        for phase, colour in PHASES.items()
        if phase in phases
    }
    if unfinished(trace) or any(e > b for one in ranks for b, e in waiting(one)):
        entries["waiting"] = Patch(facecolor=WAITING, edgecolor=UNFINISHED)
    for op in in_order(ops):
        name = "send, recv" if op in ("send", "recv") else op
        entries[literal(name)] = tuple(Patch(facecolor=shade(op, number)) for number in (0, 1))
    if unfinished(trace):
        entries["never ended"] = Patch(facecolor=PAPER, edgecolor=UNFINISHED, linewidth=1.6)
    return entries


def add_legend(figure: Figure, entries: Mapping[str, Any]) -> Legend:
    """Below the axes."""
    inches = sum(0.5 + 0.075 * len(name) for name in entries)
    rows = 1 if inches < WIDTH_IN else 2
    return figure.legend(
        list(entries.values()), list(entries), loc="lower center", ncols=-(-len(entries) // rows),
        handlelength=1.3, handleheight=0.9, columnspacing=1.5, borderaxespad=0.3,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def unfinished(trace: Trace) -> bool:
    """Whether anything in it never ended."""
    return any(not x.ended_s for one in trace.ranks.values() for x in one.things())


def title_of(part: Trace, step: int | None, ranks: Sequence[int], steps: int) -> str:
    """Which of the run's `steps`, how many ranks, how long; how much communication was hidden, if
    there was computing to hide it."""
    shown = Trace({rank: part.ranks[rank] for rank in ranks})
    last_ms = end_of(part) * 1e3
    last = f"{last_ms:,.0f} ms" if last_ms >= 100 else f"{last_ms:.3g} ms"
    of = f"{len(ranks)} of " if len(ranks) < part.size else ""
    which = [f"Step {step}"] if steps > 1 else []
    stand_for_more = any(x.alike for x in shown.ranks.values())
    alike = (", all alike" if len(ranks) == 1 else ", the others alike") if stand_for_more else ""
    where = part.about.get("replayed")
    words = [
        *(["The whole run"] if step is None else which),
        f"{of}{part.size} rank{'s' * (part.size != 1)}{alike}",
        f"unfinished after {last}" if unfinished(part) else last,
    ]
    of_ranks = shown.ranks.values()
    if any(x.ended_s for one in of_ranks for x in one.comms) and any(x.spans for x in of_ranks):
        behind = "" if where else " behind computing"  # there is only so much room
        words.append(f"{overlap(shown):.0%} of communication hidden{behind}")
    if where:
        words.append(f"replayed on {literal(str(where))}")
    if link := part.about.get("link"):
        words.append(f"paced to {speed_of(link)}")
    return "  ·  ".join(words)


def speed_of(link: Mapping[str, Any]) -> str:
    """A link as a run notes it, of one level or of two, in words."""
    if "inside" not in link:
        return f"{link['gbps']:g} Gbit/s"
    return f"{speed_of(link['inside'])} inside nodes, {speed_of(link['between'])} between"


def group_name(group: str) -> str:
    """ "default" and "3 (ranks 0, 2)", as the door calls them, in words for a narrow margin."""
    name = group.partition(" of world ")[0]
    if name == "default":
        return "all ranks"
    name = name[name.find("(") + 1 :].removesuffix(")")
    return name if len(name) <= 16 else name[:14].rstrip(", ") + " …"
