"""What the picture of a pipeline shows, before it is drawn: the actions of each stage, the bubble,
the activations held; for a schedule by its costs, or for a recorded run of it.
"""

from dataclasses import dataclass

from labkit.plot.choice import choose_step
from labkit.replaying.microbatches import TimedAction, by_microbatch, timed_actions
from labkit.replaying.pipeline import Seconds, pipeline_trace
from labkit.schedules import Schedule, chunks_of, peak_in_flight
from labkit.trace import Trace

UNITS = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0, "update": 0.0}


@dataclass(frozen=True)
class Lanes:
    """What one panel shows: `of_stage` is what each stage did when, in `unit` ("ms" or "")."""

    name: str
    of_stage: list[list[TimedAction]]
    unit: str
    note: str = ""

    @property
    def length(self) -> float:
        """From the first action to the end of the last one, in `unit`."""
        return max(x.ended_s for actions in self.of_stage for x in actions)

    @property
    def step(self) -> float:
        """The longest time from a stage's first action to its last (`pipeline_step_s`): the next
        step may begin on each stage so much later."""
        return max(done[-1].ended_s - done[0].began_s for done in self.of_stage if done)

    @property
    def bubble(self) -> float:
        """The part of a step, of all stages together, in which nothing was computed: 0 to 1."""
        busy = sum(x.ended_s - x.began_s for actions in self.of_stage for x in actions)
        return 1 - busy / (self.step * len(self.of_stage)) if self.step else 0.0

    @property
    def windows(self) -> list[tuple[float, float]]:
        """When the step runs on each stage; in it, all but computing is bubble."""
        ends = [done[-1].ended_s if done else self.step for done in self.of_stage]
        return [(begin, begin + self.step) for end in ends for begin in [max(0.0, end - self.step)]]

    @property
    def chunks(self) -> int:
        """Of each stage."""
        return 1 + max(x.action.chunk for actions in self.of_stage for x in actions)

    @property
    def held(self) -> list[float]:
        """The most micro-batches whose activations each stage holds, from a forward until its
        backward or its weights' gradients; one chunk counts as a part of a micro-batch."""
        order = [[x.action for x in done] for done in self.of_stage]
        return [peak / self.chunks for peak in peak_in_flight(order)]

    @property
    def phases(self) -> set[str]:
        """The phases of its actions."""
        return {x.action.phase for actions in self.of_stage for x in actions}

    @property
    def title(self) -> str:
        """Name, sizes, seconds of a step, bubble."""
        microbatches = len({x.action.microbatch for actions in self.of_stage for x in actions})
        counts = [
            (len(self.of_stage), "stage", ("", "s")),
            (microbatches, "micro-batch", ("", "es")),
            *[(self.chunks, "chunk", ("", "s"))] * (self.chunks > 1),
        ]
        sizes = ", ".join(f"{n} {word}{ending[n > 1]}" for n, word, ending in counts)
        length = f"{self.step:.4g} {self.unit or 'forwards long'}"
        parts = [self.name, sizes, length, f"bubble {self.bubble:.1%} of the total", self.note]
        return "  ·  ".join(part for part in parts if part)


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
    found = timed_actions(pipeline_trace(what, units if costs is None else costs, message_s))
    return _from_zero(name, found, "" if costs is None else "ms")


def _of_trace(name: str, trace: Trace, step: int | None) -> Lanes:
    """One step of the trace; all of it where a stage's own update ends its step."""
    updates = any(x.action.phase == "update" for stage in timed_actions(trace) for x in stage)
    if trace.steps() and not updates:
        trace = trace.step(choose_step(trace, step))  # type: ignore[arg-type]
    return _from_zero(name, timed_actions(trace), "ms", "paced" * bool(trace.about.get("paced")))


def _from_zero(name: str, found: list[list[TimedAction]], unit: str, note: str = "") -> Lanes:
    zero_s = min(x.began_s for actions in found for x in actions)
    scale = 1e3 if unit == "ms" else 1.0
    of_stage = [
        [
            TimedAction(x.action, (x.began_s - zero_s) * scale, (x.ended_s - zero_s) * scale)
            for x in actions
        ]
        for actions in found
    ]
    return Lanes(name, of_stage, unit, note)
