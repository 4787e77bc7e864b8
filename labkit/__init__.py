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
        "autocast": "labkit.precision",
        "Batch": "labkit.data",
        "bf16_compress_hook": "labkit.parallel.parts.comm_hooks",
        "Bus": "labkit.memory.bus",
        "choose_activations": "labkit.memory.budgets",
        "clip_grad_norm": "labkit.parallel.parts.clipping",
        "Cluster": "labkit.clusters",
        "cluster": "labkit.clusters",
        "CollectiveMismatch": "labkit.comm",
        "ColumnParallelLinear": "labkit.parallel.tensor_linear",
        "Comm": "labkit.comm",
        "CommError": "labkit.comm",
        "CommEvent": "labkit.events",
        "compressed": "labkit.parallel.parts.comm_hooks",
        "context_parallel": "labkit.parallel.context",
        "DDP": "labkit.parallel",
        "dry_run": "labkit.replaying",
        "find_nonfinite": "labkit.precision",
        "FlashAttention": "labkit.memory.flash_attention",
        "Format": "labkit.precision",
        "FORMATS": "labkit.precision",
        "fp16_compress_hook": "labkit.parallel.parts.comm_hooks",
        "Fp32Gradients": "labkit.precision",
        "Fp8Linear": "labkit.precision",
        "full_state_dict": "labkit.parallel.parts.whole",
        "GPT": "labkit.models",
        "GradScaler": "labkit.precision",
        "Handle": "labkit.comm",
        "Int8Blocks": "labkit.precision",
        "keep_products": "labkit.memory.policies",
        "known_clusters": "labkit.clusters",
        "Link": "labkit.comm",
        "listen": "labkit.comm",
        "load_checkpoint": "labkit.checkpoints",
        "load_then_run": "labkit.memory.loading",
        "loss": "labkit.data",
        "MasterWeights": "labkit.precision",
        "measure_machine": "labkit.bench.machine",
        "Mesh": "labkit.comm",
        "metric": "labkit.recording",
        "MLP": "labkit.models",
        "NaiveDDP": "labkit.parallel",
        "offload_activations": "labkit.memory.offload",
        "ParameterServer": "labkit.parallel",
        "partition_activations": "labkit.parallel.partitioned_activations",
        "positions_of": "labkit.parallel.parts.zigzag",
        "progress": "labkit.world",
        "RankError": "labkit.world",
        "RankInterrupt": "labkit.world",
        "read_clusters": "labkit.clusters",
        "read_nccl_log": "labkit.nccl_log",
        "read_run": "labkit.trace",
        "Recompute": "labkit.memory.edits",
        "recompute": "labkit.memory.recompute",
        "record": "labkit.recording",
        "replay": "labkit.replaying",
        "rounded": "labkit.precision",
        "RowParallelLinear": "labkit.parallel.tensor_linear",
        "run_in_place": "labkit.memory.loading",
        "run_pipelined": "labkit.memory.loading",
        "save_checkpoint": "labkit.checkpoints",
        "sequence_shard": "labkit.parallel.parts.zigzag",
        "Single": "labkit.parallel",
        "span": "labkit.recording",
        "split_of": "labkit.trace",
        "tensor_parallel": "labkit.parallel.tensor",
        "Text": "labkit.data",
        "Transfer": "labkit.memory.transfers",
        "TwoLevel": "labkit.comm",
        "use_fp8": "labkit.precision",
        "vocab_parallel_cross_entropy": "labkit.parallel.vocab_parallel",
        "VocabParallelEmbedding": "labkit.parallel.vocab_parallel",
        "VocabParallelHead": "labkit.parallel.vocab_parallel",
        "Waiting": "labkit.memory.loading",
        "watch_collective": "labkit.recording",
        "what_if": "labkit.replaying",
        "World": "labkit.world",
        "write_clusters": "labkit.clusters",
        "write_run": "labkit.trace",
        "ZeRO3": "labkit.parallel",
        "ZeroOptimizer": "labkit.parallel",
    },
)


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext labkit`: the magics `%%ranks` and `%ranks`."""
    from labkit.world.magics import RankMagics

    ipython.register_magics(RankMagics)
