"""The recorded run on another machine: programs of ranks under a virtual clock.

dry_runs    record a rank of many without data; does it fit
replays     a recorded run with the times of a cluster
summary     the same on one cluster after the other, as a table
what_ifs    the same with sliders; redrawing.py has what they change and draw
pipeline    a pipeline schedule from the times of its stages
engine      the virtual clock
costs       times of operations and collectives on a cluster
planning/   models too large to record whole: steps of layouts, and the best of them
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
