"""Measurements of labkit against its peers, side by side in one run."""

from importlib import import_module
from typing import Any

_HOME = {
    "bench_collectives": "labkit.bench.collectives",
    "bench_ddp": "labkit.bench.ddp",
    "bench_door": "labkit.bench.door",
    "bench_plot": "labkit.bench.plot",
    "bench_shm": "labkit.bench.shm",
    "bench_world": "labkit.bench.world",
    "fit": "labkit.bench.fits",
    "read_sweep": "labkit.bench.sweep",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"labkit.bench has no {name!r}; it has {', '.join(_HOME)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
