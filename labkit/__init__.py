"""labkit: distributed training you can read, run, check and see.

The names below are imported when they are first used, so that `import labkit` is immediate.
"""

from typing import Any

from labkit.lazy import lazy

__version__ = "0.1.0"

NAMES = {  # of each module
    "bench.machine": "measure_machine",
    "checkpoints": "load_checkpoint save_checkpoint",
    "clusters": "Cluster cluster known_clusters read_clusters write_clusters",
    "comm": "CollectiveMismatch Comm CommError Handle Link listen Mesh TwoLevel",
    "data": "Batch loss Text",
    "events": "CommEvent",
    "memory.bus": "Bus",
    "memory.edits": "Recompute recompute",
    "memory.flash_attention": "FlashAttention",
    "memory.loading": "load_then_run run_in_place run_pipelined Waiting",
    "memory.measuring": "choose_activations",
    "memory.offload": "offload_activations",
    "memory.policies": "keep_products",
    "memory.transfers": "Transfer",
    "models": "GPT MLP",
    "parallel": "AsyncParameterServer DDP NaiveDDP ParameterServer Pipeline Single ZeRO3 "
    "ZeroOptimizer",
    "parallel.common.clipping": "clip_grad_norm",
    "parallel.common.whole": "full_state_dict",
    "parallel.context.context_parallel": "context_parallel",
    "parallel.context.zigzag": "positions_of sequence_shard",
    "parallel.ddp.comm_hooks": "bf16_compress_hook compressed fp16_compress_hook",
    "parallel.paced_stage": "PacedStage",
    "parallel.partitioned_activations": "partition_activations",
    "parallel.splitting": "measure_costs split",
    "parallel.tensor.linear": "ColumnParallelLinear RowParallelLinear",
    "parallel.tensor.tensor_parallel": "tensor_parallel",
    "parallel.tensor.vocab": "vocab_parallel_cross_entropy VocabParallelEmbedding "
    "VocabParallelHead",
    "precision": "autocast find_nonfinite Format FORMATS Fp32Gradients Fp8Linear GradScaler "
    "Int8Blocks MasterWeights rounded use_fp8",
    "replaying": "by_microbatch dry_run replay what_if",
    "replaying.planning.layout": "Layout Sizes",
    "replaying.planning.ranking": "fits largest_that_fits plan",
    "replaying.planning.steps": "step_report step_trace",
    "runtime.attach": "attach",
    "runtime.errors": "RankError RankInterrupt",
    "runtime.progress": "progress",
    "runtime.world": "World",
    "schedules": "Action parse_schedule schedule ScheduleError",
    "trace": "read_run split_of write_run",
    "trace.nccl_log": "read_nccl_log",
    "trace.recording": "metric record span watch_collective",
}
__all__, __getattr__, __dir__ = lazy(
    __name__,
    {name: f"{__name__}.{home}" for home, names in NAMES.items() for name in names.split()},
)


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext labkit`: the magics `%%ranks` and `%ranks`."""
    from labkit.runtime.magics import RankMagics

    ipython.register_magics(RankMagics)
