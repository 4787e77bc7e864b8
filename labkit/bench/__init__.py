"""Benchmarks of labkit and its peers in the same run; `labkit bench` is their command line.

harness.py contains the code that the step benchmarks share: turns, ratios, tables and files.
"""

from labkit.lazy import lazy

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "bench_attention": "labkit.bench.attention",
        "bench_collectives": "labkit.bench.collectives",
        "bench_data_parallel": "labkit.bench.data_parallel",
        "bench_pipeline": "labkit.bench.pipeline",
        "bench_precision": "labkit.bench.precision",
        "bench_replay": "labkit.bench.replay",
        "bench_tensor_parallel": "labkit.bench.tensor_parallel",
        "bench_transfers": "labkit.bench.transfers",
        "read": "labkit.bench.harness",
        "read_transfers": "labkit.bench.transfers",
        "show_stored": "labkit.bench.stored",
    },
)
