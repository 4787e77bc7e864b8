"""The recorded run on another machine: programs of ranks under a virtual clock.

dry_runs    record a rank of many without data; does it fit
replays     a recorded run with the times of a cluster
summary     the same on one cluster after the other, as a table
what_ifs    the same with sliders: changes.py has the cluster, redrawing.py the picture
pipeline    a pipeline schedule from the times of its stages
engine      the virtual clock
costs       times of operations and collectives on a cluster
planning/   models too large to record whole: steps of layouts, and the best of them
"""

from labkit.lazy import lazy

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "bubble": "labkit.replaying.pipeline",
        "by_microbatch": "labkit.replaying.pipeline",
        "changed": "labkit.replaying.changes",
        "Compute": "labkit.replaying.engine",
        "Costs": "labkit.replaying.costs",
        "Deadlock": "labkit.replaying.engine",
        "dry_run": "labkit.replaying.dry_runs",
        "fits": "labkit.replaying.dry_runs",
        "Issue": "labkit.replaying.engine",
        "largest_that_fits": "labkit.replaying.dry_runs",
        "peak_of": "labkit.replaying.dry_runs",
        "pipeline_programs": "labkit.replaying.pipeline",
        "pipeline_step_s": "labkit.replaying.pipeline",
        "pipeline_trace": "labkit.replaying.pipeline",
        "Program": "labkit.replaying.engine",
        "replay": "labkit.replaying.replays",
        "run": "labkit.replaying.engine",
        "stage_seconds": "labkit.replaying.pipeline",
        "Timed": "labkit.replaying.engine",
        "Wait": "labkit.replaying.engine",
        "what_if": "labkit.replaying.what_ifs",
    },
)
