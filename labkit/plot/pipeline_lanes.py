"""What the picture of a pipeline shows, before it is drawn: the actions of each stage, the bubble,
the activations held; for a schedule by its costs, or for a recorded run of it.
"""

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
    """What one panel shows: the timed actions of each stage, in `unit` ("ms", or "" for forwards),
    the first at 0.

    length    from the first action to the end of the last one
    step      the longest time from a stage's first action to its last (`pipeline_step_s`): the next
              step may begin on each stage so much later
    bubble    the part of a step, of all stages together, in which nothing is computed: 0 to 1
    windows   when the step runs on each stage; all of it but computing is bubble
    held      the most micro-batches whose activations each stage holds, from a forward until its
              backward or its weights' gradients; one chunk counts as a part of a micro-batch
    """

    name: str
    stages: list[list[TimedAction]]
    unit: str
    note: str = ""

    def __post_init__(self) -> None:
        self.actions = [timed for stage in self.stages for timed in stage]
        self.chunks = 1 + max(timed.action.chunk for timed in self.actions)  # of each stage
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
        """Name, sizes, length of a step, bubble."""
        stages = len(self.stages)
        microbatches = len({timed.action.microbatch for timed in self.actions})
        sizes = f"{stages} stage{'s' * (stages > 1)}, "
        sizes += f"{microbatches} micro-batch{'es' * (microbatches > 1)}"
        sizes += f", {self.chunks} chunks" * (self.chunks > 1)
        length = f"{self.step:.4g} {self.unit or 'forwards long'}"
        bubble = f"bubble {self.bubble:.1%} of the total"
        return "  ·  ".join(filter(None, (self.name, sizes, length, bubble, self.note)))


def lanes_of(
    what: Schedule | Trace,
    name: str = "",
    costs: Seconds | None = None,
    message_s: float = 0.0,
    recorded: Trace | None = None,
    step: int | None = None,
) -> Lanes:
    """What `plot.schedule` draws. Arguments and errors as there."""
    if isinstance(what, Trace):
        if recorded is not None:
            raise ValueError("give the schedule first, then recorded=trace: here are two traces")
        return _of_trace(name, what, step)
    if not any(what):
        raise ValueError("this schedule has no action; give each stage a list of them")
    if recorded is not None:
        return _of_trace(name, by_microbatch(recorded, what), step)
    units = {phase: units / chunks_of(what) for phase, units in UNITS.items()}
    trace = pipeline_trace(what, units if costs is None else costs, message_s)
    return _from_zero(name, timed_actions(trace), "" if costs is None else "ms")


def _of_trace(name: str, trace: Trace, step: int | None) -> Lanes:
    """One step of the trace; all of it where a stage's own update ends its step."""
    updates = any(x.action.phase == "update" for stage in timed_actions(trace) for x in stage)
    if trace.steps() and not updates:
        trace = trace.step(choose_step(trace, step))  # type: ignore[arg-type]
    return _from_zero(name, timed_actions(trace), "ms", "paced" * bool(trace.about.get("paced")))


def _from_zero(name: str, stages: list[list[TimedAction]], unit: str, note: str = "") -> Lanes:
    zero_s = min(x.began_s for stage in stages for x in stage)
    scale = 1e3 if unit == "ms" else 1.0
    moved = [
        [TimedAction(x.action, *((t - zero_s) * scale for t in x[1:])) for x in stage]
        for stage in stages
    ]
    return Lanes(name, moved, unit, note)
