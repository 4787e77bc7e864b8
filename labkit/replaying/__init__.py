"""The recorded run on another machine: programs of ranks under a virtual clock."""

from labkit.lazy import lazy

NAMES = {  # of each module
    "costs": "Costs",
    "dry_runs": "dry_run fits largest_that_fits peak_of",
    "engine": "Compute Deadlock Issue Program Timed Wait run",
    "pipeline": "bubble by_microbatch pipeline_programs pipeline_step_s pipeline_trace "
    "stage_seconds",
    "redrawing": "changed",
    "replays": "replay",
    "what_ifs": "what_if",
}
__all__, __getattr__, __dir__ = lazy(
    __name__,
    {name: f"{__name__}.{home}" for home, names in NAMES.items() for name in names.split()},
)
