"""Measurements of labkit against its peers, side by side in one run."""

from labkit.lazy import lazy

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "bench_collectives": "labkit.bench.collectives",
        "bench_data_parallel": "labkit.bench.data_parallel",
        "bench_pipeline": "labkit.bench.pipeline",
        "bench_precision": "labkit.bench.precision",
        "bench_tensor_parallel": "labkit.bench.tensor_parallel",
        "bench_transfers": "labkit.bench.transfers",
        "fit": "labkit.bench.fits",
        "read_sweep": "labkit.bench.sweep",
        "read_transfers": "labkit.bench.transfers",
        "show_stored": "labkit.bench.stored",
        "stored_transfers": "labkit.bench.transfers",
    },
)
