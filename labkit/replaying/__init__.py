"""The recorded run on another machine: programs of ranks under a virtual clock."""

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
