"""A recorded run replayed on another machine: one program per rank under a virtual clock.

dry_runs            record one rank of many without data; does it fit in memory?
replays, summary    a recorded run with the times of a cluster, or of several, as a table
what_ifs            a replay with sliders; redrawing.py draws it
pipeline            a pipeline schedule, timed from its stages
engine, costs       the virtual clock; times of operations and collectives on a cluster
planning/           models too large to record whole: their layouts, and the fastest one
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
