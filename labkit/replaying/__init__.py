"""The recorded run on another machine: programs of ranks under a virtual clock.

dry_run     record a rank of many without data
replay      a recorded run with the times of a cluster
what_if     the same with sliders
engine      the virtual clock
costs       times of operations and collectives on a cluster
"""

from labkit.lazy import lazy

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "by_microbatch": "labkit.replaying.microbatches",
        "bubble": "labkit.replaying.pipeline",
        "changed": "labkit.replaying.changes",
        "Compute": "labkit.replaying.engine",
        "Costs": "labkit.replaying.costs",
        "Deadlock": "labkit.replaying.engine",
        "fits": "labkit.replaying.memory",
        "largest_that_fits": "labkit.replaying.memory",
        "peak_of": "labkit.replaying.memory",
        "pipeline_step_s": "labkit.replaying.pipeline",
        "pipeline_trace": "labkit.replaying.pipeline",
        "stage_seconds": "labkit.replaying.pipeline",
        "dry_run": "labkit.replaying.dry_runs",
        "Issue": "labkit.replaying.engine",
        "pipeline_programs": "labkit.replaying.pipeline",
        "Program": "labkit.replaying.engine",
        "replay": "labkit.replaying.replays",
        "run": "labkit.replaying.engine",
        "Timed": "labkit.replaying.engine",
        "Wait": "labkit.replaying.engine",
        "what_if": "labkit.replaying.what_ifs",
    },
)
