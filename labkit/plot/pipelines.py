"""Pipeline schedules, replayed or recorded: a lane per stage, a box per action, gray idle time.

stage 0  │0│1│2│3│     │ 0 │4│ 1 │ ...        numbers: micro-batches; colors: phases;
stage 1    │0│1│2│   │ 0 │3│ 1 │ ...          lighter tints: later chunks
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.plot.figure import Picture, lane_axes, legend_strip, size_in, styled
from labkit.plot.lettering import NAME_PT, Lettering, Name, fit_title
from labkit.plot.pipeline_lanes import Lanes, lanes_of
from labkit.plot.style import FAINT, INK, MUTED, PAPER, PHASES, SMALL_PT, text_on, tint
from labkit.replaying.pipeline import Seconds
from labkit.schedules import Schedule
from labkit.trace import Trace

WORDS = {"input": "backward: input", "weight": "backward: weights", "update": "weight update"}
LANE_IN, LANES_IN = 0.34, 7.0  # height of a stage; maximum for all stages
LEFT_IN, RIGHT_IN, TITLE_IN, TICKS_IN, LEGEND_IN = 0.85, 0.95, 0.38, 0.42, 0.42
LANE = 0.86  # fraction of a stage's height filled by its boxes
LIGHTEST = 0.45  # fraction of white in the color of the last chunk
LINE_PX, EDGE_PX = 13, 5


@styled
def schedule(
    pipeline: Schedule | Trace,
    costs: Seconds | None = None,
    message_s: float = 0.0,
    *,
    recorded: Trace | None = None,
    step: int | None = None,
    name: str = "",
    figure: Figure | None = None,
) -> Figure:
    """A pipeline schedule over time: which micro-batch each stage computes, and when it is idle.

    Each lane is labeled with its peak number of micro-batches in flight: a micro-batch holds
    activations from its forward until the end of its backward (or of its weight gradients).

    Args:
        pipeline: a schedule, or a trace with spans named after micro-batches (`by_microbatch`).
        costs: a dict of seconds per action, {"forward": 1e-3, "backward": 2e-3} ("input" and
            "weight" too if backward is split), or a function of stage and action. If None, a
            forward takes 1 and a backward 2 per stage and micro-batch; input and weight 1 each.
        message_s: time per message, in the same unit.
        recorded: a recorded run of the schedule, from which to take the times. If stages sleep
            (`PacedStage`), `record(paced=True)` notes this in the title.
        step: a step of the recorded run; None chooses as `plot.timeline` does.

    Raises ValueError for an empty or invalid schedule, an action without a cost, or a trace
    of a different schedule.
    """
    return _draw([lanes_of(pipeline, name, costs, message_s, recorded, step)], figure)


@styled
def schedules(
    many: Mapping[str, Schedule | Trace],
    costs: Seconds | None = None,
    message_s: float = 0.0,
    *,
    figure: Figure | None = None,
) -> Figure:
    """Several schedules or recorded traces, by name, on one time axis: shorter is faster.

    `costs` and `message_s` apply to all schedules. Raises ValueError as `plot.schedule` does,
    and if `many` is empty.
    """
    if not many:
        raise ValueError('nothing to draw: pass schedules by name, e.g. {"1F1B": schedule}')
    lanes = [lanes_of(x, name, costs, message_s) for name, x in many.items()]
    return _draw(lanes, figure)


def _draw(panels: Sequence[Lanes], figure: Figure | None) -> Figure:
    """Draw the panels one below the other; panels with the same unit share a time range."""
    lane_in = min(LANE_IN, LANES_IN / max(len(panel.stages) for panel in panels))
    heights = [lane_in * len(panel.stages) for panel in panels]
    around_in = len(panels) * (TITLE_IN + TICKS_IN) + LEGEND_IN
    figure = figure or Picture(sum(heights) + around_in)
    height_in = size_in(figure)[1]
    scale = max(height_in - around_in, 0.1) / sum(heights)
    above_in = 0.0
    for i, (panel, panel_in) in enumerate(zip(panels, heights, strict=True)):
        above_in += TITLE_IN
        below_in = height_in - above_in - panel_in * scale
        axes = lane_axes(figure, LEFT_IN, RIGHT_IN, above_in, below_in)
        above_in += panel_in * scale + TICKS_IN
        others = [x for x in panels if x.unit == panel.unit]
        _draw_panel(axes, panel, max(x.length for x in others) or 1.0)
        if len(others) < len(panels) or i == len(panels) - 1:
            axes.set_xlabel(panel.unit or "time, in forwards of one stage", labelpad=2)
    phases = {timed.action.phase for panel in panels for timed in panel.actions}
    entries = {WORDS.get(x, x): Patch(facecolor=PHASES[x]) for x in PHASES if x in phases}
    entries["idle"] = Patch(facecolor=FAINT)
    if any(panel.chunks > 1 for panel in panels):
        lightest = tint(PHASES["forward"], LIGHTEST)
        entries["later chunks: lighter"] = Patch(facecolor=lightest)
    legend_strip(figure, entries)
    return figure


def _draw_panel(axes: Axes, panel: Lanes, longest: float) -> None:
    stages = len(panel.stages)
    axes.set(xlim=(0, longest * 1.005), ylim=(stages, 0))
    fit_title(axes, panel.title)
    box = axes.get_window_extent()
    px_per_unit, px_per_lane = box.width / (longest * 1.005), box.height / stages
    numbers = Lettering(axes, NAME_PT, axes.transData, align=0.5, clip=True)
    px_per_pt = axes.figure.dpi / 72
    names = []
    for stage, (actions, (begin, end)) in enumerate(zip(panel.stages, panel.windows)):
        boxes, colors, edges = [(begin, end - begin)], [FAINT], [FAINT]  # idle time, behind actions
        for action, began, ended in actions:
            lighter = LIGHTEST * action.chunk / max(panel.chunks - 1, 1)
            color, width_px = tint(PHASES[action.phase], lighter), (ended - began) * px_per_unit
            boxes.append((began, ended - began))
            colors.append(color)
            edges.append(PAPER if width_px > EDGE_PX else color)
            text = str(action.microbatch)
            if numbers.width_pt("0" * len(text)) * px_per_pt + 2 < width_px:
                names.append(Name(text, (began + ended) / 2, stage + 0.5, text_on(color)))
        axes.broken_barh(
            boxes, (stage + (1 - LANE) / 2, LANE), facecolors=colors, edgecolors=edges,
            linewidths=0.7, joinstyle="miter", zorder=2,
        )  # fmt: skip
    if px_per_lane * LANE > LINE_PX - 2:
        numbers.write(names)
    every = 1  # label every lane, or every second, fourth, ...
    while every * px_per_lane < LINE_PX and every < stages:
        every *= 2
    beside = axes.get_yaxis_transform()  # x: 0 is the left end of the axes, 1 the right
    left = Lettering(axes, SMALL_PT, beside, align=1.0, clip=False)
    right = Lettering(axes, SMALL_PT, beside, align=0.0, clip=False)
    lanes = list(enumerate(panel.held))[::every]
    left.write([Name(f"stage {stage}", -0.008, stage + 0.5, INK) for stage, _ in lanes])
    right.write([Name(f"holds {held:.3g}", 1.008, stage + 0.5, MUTED) for stage, held in lanes])
