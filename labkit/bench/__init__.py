"""Measurements of labkit beside its peers, in one run; `labkit bench` is their command line.

harness.py has what the benches of a step share: turns, ratios, table, file.
"""

from labkit.lazy import lazy

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
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
