"""The recorded run on another machine: programs of ranks under a virtual clock.

dry_run     record a rank of many without data
replay      a recorded run with the times of a cluster
what_if     the same with sliders
engine      the virtual clock
costs       times of operations and collectives on a cluster
"""

from labkit.lazy import lazy

NAMES = {  # by module
    "dry_runs": ("dry_run", "fits", "largest_that_fits", "peak_of"),
    "replays": ("replay",),
    "what_ifs": ("what_if",),
    "redrawing": ("changed",),
    "engine": ("Compute", "Deadlock", "Issue", "Program", "Timed", "Wait", "run"),
    "costs": ("Costs",),
    "pipeline": ("bubble", "by_microbatch", "pipeline_programs", "pipeline_step_s",
                 "pipeline_trace", "stage_seconds"),
}  # fmt: skip
__all__, __getattr__, __dir__ = lazy(
    __name__, {name: f"{__name__}.{home}" for home, names in NAMES.items() for name in names}
)
