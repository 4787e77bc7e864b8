"""Pipeline schedules as data: pure functions that return a list of actions per stage.

    naive          one stage at a time
    gpipe          all forwards, then all backwards
    1f1b           one forward, one backward, alternating
    interleaved    1F1B with several chunks per stage
    zb-h1, zb-h2   weight gradients fill idle time
    pipedream      1F1B that updates after each micro-batch

`schedule("1f1b", stages, microbatches)` builds a schedule by name (catalogue.py, zero_bubble.py). A
custom schedule is a list of actions per stage (actions.py) or text (text.py); rules.py checks it.
"""

from labkit.schedules.actions import (
    Action,
    Message,
    Schedule,
    chunks_of,
    microbatches_of,
    received,
    sent,
    stage_and_chunk,
    virtual_stage,
)
from labkit.schedules.catalogue import (
    SCHEDULES,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    schedule,
)
from labkit.schedules.rules import ScheduleError, check, peak_in_flight, run_order
from labkit.schedules.text import parse, parse_schedule, show
from labkit.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

__all__ = [
    "SCHEDULES", "Action", "Message", "Schedule", "ScheduleError", "check", "chunks_of", "gpipe",
    "interleaved", "microbatches_of", "naive", "one_f_one_b", "parse", "parse_schedule",
    "peak_in_flight", "pipedream", "received", "run_order", "schedule", "sent", "show",
    "stage_and_chunk", "virtual_stage", "zero_bubble_h1", "zero_bubble_h2",
]  # fmt: skip
