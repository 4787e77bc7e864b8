"""Pipeline schedules as data: pure functions of numbers, one list of actions for each stage.

    naive          one stage at a time                             gpipe.py
    gpipe          all forwards, then all backwards                gpipe.py
    1f1b           one forward, one backward, in turns             one_f_one_b.py
    interleaved    1F1B with several chunks on each stage          one_f_one_b.py
    zb-h1, zb-h2   the weights' gradients where it would idle      zero_bubble.py
    pipedream      1F1B that updates after each micro-batch        one_f_one_b.py

`schedule("1f1b", stages, microbatches)` makes one by its name. Read `actions.py` first: what a
schedule is made of, and what travels. A schedule of your own is a list of actions for each stage,
or text (`parse_schedule`); `check` (`rules.py`) says which rule it breaks first, `show` prints it.
"""

from collections.abc import Callable

from labkit.schedules.actions import (
    Action,
    Message,
    Schedule,
    chunks_of,
    microbatches_of,
    parse,
    parse_schedule,
    received,
    sent,
    stage_and_chunk,
    virtual_stage,
)
from labkit.schedules.gpipe import gpipe, naive
from labkit.schedules.one_f_one_b import interleaved, one_f_one_b, pipedream
from labkit.schedules.rules import ScheduleError, check, peak_in_flight, run_order, show
from labkit.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

__all__ = [
    "SCHEDULES",
    "Action",
    "Message",
    "Schedule",
    "ScheduleError",
    "check",
    "chunks_of",
    "gpipe",
    "interleaved",
    "microbatches_of",
    "naive",
    "one_f_one_b",
    "parse",
    "parse_schedule",
    "peak_in_flight",
    "pipedream",
    "received",
    "run_order",
    "schedule",
    "sent",
    "show",
    "stage_and_chunk",
    "virtual_stage",
    "zero_bubble_h1",
    "zero_bubble_h2",
]

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
    "pipedream": pipedream,
}


def schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of this name. Raises ValueError for an unknown name, and for numbers that it
    cannot do, with the rule that they break.

    >>> print(show(schedule("1f1b", stages=2, microbatches=2)))
    stage 0  F0 F1 .. B0 .. B1
    stage 1  .. F0 B0 F1 B1
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r}: there are {', '.join(SCHEDULES)}")
    if name == "interleaved":
        return interleaved(stages, microbatches, chunks)
    if chunks != 1:
        raise ValueError(
            f"chunks={chunks}: {name} has one piece of the model on each stage; for several, take "
            "interleaved"
        )
    return SCHEDULES[name](stages, microbatches)
