"""All schedules at every admissible size up to 8 stages, 32 micro-batches and 4 chunks, what each
promises to hold, and an oracle that shares nothing with `check`."""

from collections.abc import Callable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from hypothesis import strategies as st

from labkit import predict
from labkit.schedules import SCHEDULES, Action, Schedule, schedule

Case = tuple[str, int, int, int]  # name, stages p, micro-batches m, chunks v


@st.composite
def cases(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES), largest: int = 32) -> Case:
    name = draw(st.sampled_from(names))
    p = draw(st.integers(1, 8 if name != "zb-h2" else min(8, (largest + 1) // 2)))
    if name == "interleaved":
        return name, p, p * draw(st.integers(1, max(1, largest // p))), draw(st.integers(2, 4))
    least = {"zb-h1": p, "zb-h2": 2 * p - 1}.get(name, 1)
    return name, p, draw(st.integers(least, max(least, largest))), 1


def made(case: Case) -> Schedule:
    return schedule(*case)


@dataclass(frozen=True)
class Promise:
    """What papers and files say of a schedule of p stages, m micro-batches and v chunks.

    peak     (p, m, v, stage) -> micro-batches in flight on a chunk, at the most
    formula  (p, m, *what it takes: seconds of phases, chunks) -> the closed form of a step
    """

    peak: Callable[[int, int, int, int], int]
    formula: Callable[..., predict.PipelineStep]
    takes: tuple[str, ...] = ("forward", "backward")

    def step(self, p: int, m: int, v: int, seconds: dict[str, float]) -> predict.PipelineStep:
        given = {**seconds, "chunks": v}
        return self.formula(p, m, *(given[name] for name in self.takes))


HALVES = ("forward", "input", "weight")
PROMISES = {
    "naive": Promise(lambda p, m, v, r: 1, predict.naive),
    "gpipe": Promise(lambda p, m, v, r: m, predict.gpipe),
    "1f1b": Promise(lambda p, m, v, r: min(p - r, m), predict.one_f_one_b),
    "pipedream": Promise(
        lambda p, m, v, r: min(p - r, m), predict.pipedream, ("forward", "backward", "update")
    ),
    "interleaved": Promise(
        lambda p, m, v, r: min(v * p + p - 1 - 2 * r, v * m),
        predict.interleaved, ("forward", "backward", "chunks"),
    ),
    "zb-h1": Promise(lambda p, m, v, r: p, predict.zero_bubble_h1, HALVES),
    "zb-h2": Promise(lambda p, m, v, r: 2 * p - 1, predict.zero_bubble_h2, HALVES),
}  # fmt: skip


def promised_peaks(case: Case) -> list[int]:
    """Of each stage, in micro-batches on a chunk."""
    name, p, m, v = case
    return [PROMISES[name].peak(p, m, v, stage) for stage in range(p)]


BACK = {"backward", "input"}  # what sends a gradient on


def own_order(actions: list[Action]) -> set[str]:
    """Rules that one stage breaks by its own order. Nothing may be missing."""
    broken = set()
    for i, late in enumerate(actions):
        for early in actions[i + 1 :]:  # stands behind `late`: may it?
            if late[1:] == early[1:]:
                match (early.phase, late.phase):
                    case ("forward", "backward" | "input"):
                        broken.add("backward after forward")
                    case ("forward" | "input", "weight"):
                        broken.add("weight after input")
                    case ("backward" | "input" | "weight", "update"):
                        broken.add("update after backward")
    return broken


def can_end(schedule: Schedule) -> bool:
    """Whether the graph of (virtual stage, forward or gradient, k) and messages has no cycle."""
    p = len(schedule)
    last = max(action.chunk for actions in schedule for action in actions) * p + p - 1
    graph: TopologicalSorter[object] = TopologicalSorter()
    for rank, actions in enumerate(schedule):
        before = None
        for action in actions:
            virtual = action.chunk * p + rank
            kind = "gradient" if action.phase in BACK else action.phase
            node = (virtual, kind, action.microbatch)
            graph.add(node, *([before] if before else []))
            if kind == "forward" and virtual > 0:
                graph.add(node, (virtual - 1, kind, action.microbatch))
            if kind == "gradient" and virtual < last:
                graph.add(node, (virtual + 1, kind, action.microbatch))
            before = node
    try:
        graph.prepare()
    except CycleError:
        return False
    return True
