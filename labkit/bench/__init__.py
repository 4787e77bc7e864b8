"""Measurements of labkit against its peers, side by side in one run."""

from labkit.bench.ddp import bench_ddp
from labkit.bench.door import bench_door
from labkit.bench.plot import bench_plot
from labkit.bench.shm import bench_shm
from labkit.bench.world import bench_world

__all__ = ["bench_ddp", "bench_door", "bench_plot", "bench_shm", "bench_world"]
