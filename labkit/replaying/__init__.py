"""A recorded run replayed on a different machine: one program per rank under a virtual clock.

dry_runs            record selected ranks without data; does the run fit in memory?
replays, summary    replay a recorded run on a cluster; a table for several clusters
what_ifs            a replay with sliders, drawn by redrawing.py
pipeline            a pipeline schedule, timed from its stages
engine, costs       the virtual clock; operation and collective times on a cluster
planning/           models too large to record whole: possible layouts and the fastest
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
