"""Replays a recorded run on a different machine, with one program per rank and a virtual clock.

dry_runs            record selected ranks without data; check whether a run fits in memory
replays, summary    replay a recorded run on one cluster; compare several clusters in a table
what_ifs            show a replay with sliders, drawn by redrawing.py
pipeline            time a pipeline schedule from the times of its stages
engine, costs       the virtual clock; operation and collective times on a cluster
planning/           for models too large to record whole: list layouts and find the fastest
"""

from labkit.lazy import lazy

NAMES = {
    "costs": ("Costs",),
    "dry_runs": ("dry_run", "fits", "largest_that_fits", "peak_of"),
    "engine": ("Compute", "Deadlock", "Issue", "Program", "run", "Timed", "Wait"),
    "pipeline": (
        "bubble", "by_microbatch", "pipeline_programs", "pipeline_step_s", "pipeline_trace",
        "stage_seconds",
    ),
    "redrawing": ("changed",),
    "replays": ("replay",),
    "what_ifs": ("what_if",),
}  # fmt: skip

__all__, __getattr__, __dir__ = lazy(
    __name__, {name: f"{__name__}.{module}" for module, names in NAMES.items() for name in names}
)
