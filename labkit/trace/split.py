"""Where the time of a step went: computing, communication that nothing hid, and bubble."""

from dataclasses import dataclass

from labkit.trace.graph import RankTrace, Trace
from labkit.trace.measures import Intervals, common, length_s, union, waiting


@dataclass(frozen=True)
class Split:
    """The time of one step; of several ranks, their mean. The three parts add up to it.

    compute_s   the program went on: it computed (or, on a real machine, did whatever else it does)
    exposed_s   it waited while what it waited for, or what had to leave before, was on the wire
    bubble_s    it waited for other ranks, with nothing of its own on the wire, or its step was over
    """

    step_s: float
    compute_s: float
    exposed_s: float
    bubble_s: float
    flops: float | None = None  # on one rank, where they were counted

    def mfu(self, peak_flops: float) -> float:
        """Model FLOPs utilization: the counted operations over those that a device of `peak_flops`
        a second could have done in this time. What the step computes twice is counted twice:
        with recomputation, and a little by the backward of flash attention, it is the hardware's
        utilization (`predict.step_flops` has the model's). Source: PaLM, arXiv 2204.02311,
        appendix B.

        Raises ValueError where no operations were counted.
        """
        if self.flops is None:
            raise ValueError("no operations were counted in this step; see record(detail_step=1)")
        return self.flops / (self.step_s * peak_flops)

    def __str__(self) -> str:
        parts = {"computing": self.compute_s, "exposed communication": self.exposed_s}
        parts["bubble"] = self.bubble_s
        shares = ", ".join(f"{name} {x / (self.step_s or 1):.0%}" for name, x in parts.items())
        return f"{self.step_s * 1e3:,.2f} ms: {shares}"


def split_of(trace: Trace, step: int | None = None) -> Split:
    """The split of a step, by default the last one: the mean over the ranks, of which each counts
    as often as others do the same.

    Raises ValueError for a step that is not there or has not ended on all ranks.
    """
    if not trace.steps():
        raise ValueError("this trace has no steps; they end with the step of an optimizer")
    part = trace.step(trace.steps()[-1] if step is None else step)
    weights = {number: 1 + len(one.alike) for number, one in part.ranks.items()}
    whole = _whole(part)
    splits = {number: _of_rank(one, whole) for number, one in part.ranks.items()}
    total = sum(weights.values())

    def mean(name: str) -> float:
        return sum(weights[n] * getattr(one, name) for n, one in splits.items()) / total

    counted = all(one.flops is not None for one in splits.values())
    return Split(
        mean("step_s"), mean("compute_s"), mean("exposed_s"), mean("bubble_s"),
        mean("flops") if counted else None,
    )  # fmt: skip


def _whole(part: Trace) -> tuple[float, float]:
    """From when the first rank began the step until the last one ended it."""
    for one in part.ranks.values():
        if not one.steps or not one.steps[0].ended_s:
            raise ValueError(f"rank {one.rank}: the step never ended")
    steps = [one.steps[0] for one in part.ranks.values()]
    return min(step.began_s for step in steps), max(step.ended_s for step in steps)


def _of_rank(one: RankTrace, whole: tuple[float, float]) -> Split:
    step = one.steps[0]
    stood = common(waiting(one), [(step.began_s, step.ended_s)])
    step_s = whole[1] - whole[0]
    others_s = step_s - (step.ended_s - step.began_s)  # it began later, or was done earlier
    waiting_s = length_s(stood) + others_s
    exposed_s = length_s(common(stood, _on_the_way(one)))
    flops = [span.flops for span in one.spans if span.flops is not None]
    return Split(
        step_s, step_s - waiting_s, exposed_s, waiting_s - exposed_s, sum(flops) if flops else None
    )


def _on_the_way(one: RankTrace) -> Intervals:
    """When this rank stood still for something that was on the wire: of a message, that message; of
    what it had to do with itself, also what it had handed to the wire before."""
    found, wire = [], list[tuple[float, float]]()
    for event in sorted(one.comms, key=lambda x: (x.issued_s, x.began_s)):
        own = [(event.began_s, event.ended_s)]
        if event.op != "recv":
            wire += own
        if event.wait_ended_s:
            begin_s, end_s = event.wait_began_s, event.wait_ended_s
            then = own if event.op == "recv" else [x for x in wire if x[1] > begin_s]
            found += common([(begin_s, end_s)], union(then))
    return union(found)
