"""Choosing the step and the ranks that a plot shows."""

from collections.abc import Iterable, Sequence

from labkit.trace import Trace


def choose_step(trace: Trace, step: int | None = None) -> int | None:
    """Return `step`. If None, return the unfinished step, else the first timed step after the
    warm-up, or None for a run without steps, which is drawn whole.

    Raises ValueError if `step` is not in the trace or the trace is empty.
    """
    if not any(True for rank in trace.ranks.values() for _ in rank.timed_records()):
        raise ValueError(
            "this trace is empty: nothing was recorded; train some steps inside `with record() as "
            "trace:` and draw it after that block"
        )
    steps = trace.steps()
    if step is None:
        unfinished = [x.index for rank in trace.ranks.values() for x in rank.steps if not x.ended_s]
        return max(unfinished, default=usual_steps(trace)[0]) if steps else None
    if step not in steps:
        raise ValueError(f"no step {step} in this trace; it has {listed(steps)}")
    return step


def usual_steps(trace: Trace) -> list[int]:
    """Timed steps after the first step; if there are none, all timed steps, or else all steps."""
    steps, timed = trace.steps(), trace.steps(detail=False)
    return [step for step in timed if step != steps[0]] or timed or steps


def choose_ranks(trace: Trace, ranks: Iterable[int] | None = None) -> list[int]:
    """Return `ranks`, or all if None. Raises ValueError for an unknown rank or an empty `ranks`."""
    if ranks is None:
        return sorted(trace.ranks)
    chosen = list(dict.fromkeys(ranks))
    for rank in chosen:
        if rank not in trace.ranks:
            raise ValueError(f"no rank {rank} in this trace; it has {listed(sorted(trace.ranks))}")
    if not chosen:
        raise ValueError("no ranks to draw: name at least one, or omit `ranks` to draw all")
    return chosen


def listed(numbers: Sequence[int]) -> str:
    """`0 to 3` for consecutive numbers, else `0, 2, 5`."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
