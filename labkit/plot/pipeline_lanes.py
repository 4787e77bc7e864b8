"""Contents of a pipeline plot, from a schedule and its costs or from a recorded run: actions per
stage, the bubble, and micro-batches in flight."""

from dataclasses import dataclass

from labkit.plot.choice import choose_step
from labkit.replaying.pipeline import (
    Seconds,
    TimedAction,
    by_microbatch,
    pipeline_trace,
    timed_actions,
)
from labkit.schedules import Schedule, chunks_of, peak_in_flight
from labkit.trace import Trace

UNITS = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0, "update": 0.0}


@dataclass
class Lanes:
    """One panel: timed actions per stage, shifted to begin at 0 and converted from seconds to
    `unit`: "ms", or "" if the time unit is one forward.

    length    end of the last action
    step      longest time from a stage's first action to its last (`pipeline_step_s`): the interval
              after which each stage can begin the next step
    bubble    idle fraction of the step over all stages, 0 to 1
    windows   begin and end of the step on each stage; idle time within them is the bubble
    held      peak number of micro-batches in flight per stage, from a forward until the end of the
              backward or weight gradients; a chunk counts as a fraction of a micro-batch
    """

    name: str
    stages: list[list[TimedAction]]
    unit: str
    note: str = ""

    def __post_init__(self) -> None:
        zero_s = min(x.began_s for stage in self.stages for x in stage)
        scale = 1e3 if self.unit == "ms" else 1.0
        self.stages = [
            [TimedAction(x.action, *((t - zero_s) * scale for t in x[1:])) for x in stage]
            for stage in self.stages
        ]
        self.actions = [timed for stage in self.stages for timed in stage]
        self.chunks = 1 + max(timed.action.chunk for timed in self.actions)  # per stage
        self.length = max(timed.ended_s for timed in self.actions)
        self.step = max(stage[-1].ended_s - stage[0].began_s for stage in self.stages if stage)
        busy = sum(timed.ended_s - timed.began_s for timed in self.actions)
        self.bubble = 1 - busy / (self.step * len(self.stages)) if self.step else 0.0
        ends = [max(self.step, stage[-1].ended_s if stage else 0.0) for stage in self.stages]
        self.windows = [(end - self.step, end) for end in ends]
        order = [[timed.action for timed in stage] for stage in self.stages]
        self.held = [peak / self.chunks for peak in peak_in_flight(order)]

    @property
    def title(self) -> str:
        """Name, sizes, step length, and bubble."""
        stages = len(self.stages)
        microbatches = len({timed.action.microbatch for timed in self.actions})
        sizes = f"{stages} stage{'s' * (stages > 1)}, "
        sizes += f"{microbatches} micro-batch{'es' * (microbatches > 1)}"
        sizes += f", {self.chunks} chunks" * (self.chunks > 1)
        length = f"{self.step:.4g} {self.unit or 'forwards per stage'}"
        bubble = f"bubble {self.bubble:.1%} of the step"
        return "  ·  ".join(filter(None, (self.name, sizes, length, bubble, self.note)))


def lanes_of(
    pipeline: Schedule | Trace,
    name: str = "",
    costs: Seconds | None = None,
    message_s: float = 0.0,
    recorded: Trace | None = None,
    step: int | None = None,
) -> Lanes:
    """The lanes that `plot.schedule` draws, with the same arguments and errors."""
    if isinstance(pipeline, Trace):
        if recorded is not None:
            raise ValueError("got two traces; pass the schedule first, then recorded=trace")
        return _of_trace(name, pipeline, step)
    if not any(pipeline):
        raise ValueError("this schedule has no actions; pass a list of actions for each stage")
    if recorded is not None:
        return _of_trace(name, by_microbatch(recorded, pipeline), step)
    units = {phase: units / chunks_of(pipeline) for phase, units in UNITS.items()}
    trace = pipeline_trace(pipeline, units if costs is None else costs, message_s)
    return Lanes(name, timed_actions(trace), "" if costs is None else "ms")


def _of_trace(name: str, trace: Trace, step: int | None) -> Lanes:
    """One step of the trace, or the whole trace if stages update their weights independently."""
    updates = any(x.action.phase == "update" for stage in timed_actions(trace) for x in stage)
    if trace.steps() and not updates:
        trace = trace.step(choose_step(trace, step))  # type: ignore[arg-type]
    return Lanes(name, timed_actions(trace), "ms", "paced" * bool(trace.about.get("paced")))
