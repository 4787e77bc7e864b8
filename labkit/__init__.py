"""labkit: distributed training you can read, run, check and see.

The names below are imported when they are first used, so that `import labkit` is immediate.
"""

from typing import Any

from labkit.lazy import lazy

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "AsyncParameterServer": "labkit.parallel",
        "attach": "labkit.world",
        "Batch": "labkit.data",
        "bf16_compress_hook": "labkit.parallel.parts.comm_hooks",
        "clip_grad_norm": "labkit.parallel.parts.clipping",
        "Cluster": "labkit.clusters",
        "cluster": "labkit.clusters",
        "CollectiveMismatch": "labkit.comm",
        "Comm": "labkit.comm",
        "CommError": "labkit.comm",
        "CommEvent": "labkit.events",
        "compressed": "labkit.parallel.parts.comm_hooks",
        "DDP": "labkit.parallel",
        "dry_run": "labkit.replaying",
        "fp16_compress_hook": "labkit.parallel.parts.comm_hooks",
        "GPT": "labkit.models",
        "Handle": "labkit.comm",
        "known_clusters": "labkit.clusters",
        "Link": "labkit.comm",
        "listen": "labkit.comm",
        "load_checkpoint": "labkit.checkpoints",
        "loss": "labkit.data",
        "MasterWeights": "labkit.precision",
        "measure_machine": "labkit.bench.machine",
        "Mesh": "labkit.comm",
        "metric": "labkit.recording",
        "MLP": "labkit.models",
        "NaiveDDP": "labkit.parallel",
        "ParameterServer": "labkit.parallel",
        "progress": "labkit.world",
        "RankError": "labkit.world",
        "RankInterrupt": "labkit.world",
        "read_clusters": "labkit.clusters",
        "read_nccl_log": "labkit.nccl_log",
        "read_run": "labkit.trace",
        "record": "labkit.recording",
        "replay": "labkit.replaying",
        "save_checkpoint": "labkit.checkpoints",
        "Single": "labkit.parallel",
        "span": "labkit.recording",
        "split_of": "labkit.trace",
        "Text": "labkit.data",
        "TwoLevel": "labkit.comm",
        "watch_collective": "labkit.recording",
        "what_if": "labkit.replaying",
        "World": "labkit.world",
        "write_clusters": "labkit.clusters",
        "write_run": "labkit.trace",
        "ZeroOptimizer": "labkit.parallel",
        "ZeRO3": "labkit.parallel",
    },
)


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext labkit`: the magics `%%ranks` and `%ranks`."""
    from labkit.world.magics import RankMagics

    ipython.register_magics(RankMagics)
