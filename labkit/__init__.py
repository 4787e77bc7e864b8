"""labkit: distributed training you can read, run, check and see.

The names below are imported when they are first used, so that `import labkit` is immediate.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "attach": "labkit.world",
    "Comm": "labkit.comm",
    "CommError": "labkit.comm",
    "CollectiveMismatch": "labkit.comm",
    "CommEvent": "labkit.events",
    "DDP": "labkit.parallel",
    "Batch": "labkit.data",
    "GPT": "labkit.models",
    "Handle": "labkit.comm",
    "Link": "labkit.comm",
    "listen": "labkit.comm",
    "loss": "labkit.data",
    "Mesh": "labkit.comm",
    "MLP": "labkit.models",
    "NaiveDDP": "labkit.parallel",
    "metric": "labkit.recording",
    "progress": "labkit.world",
    "RankError": "labkit.world",
    "RankInterrupt": "labkit.world",
    "record": "labkit.recording",
    "read_nccl_log": "labkit.nccl_log",
    "read_run": "labkit.trace",
    "span": "labkit.recording",
    "Single": "labkit.parallel",
    "Text": "labkit.data",
    "TwoLevel": "labkit.comm",
    "World": "labkit.world",
    "write_run": "labkit.trace",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"labkit has no {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext labkit`: the magics `%%ranks` and `%ranks`."""
    from labkit.world.magics import RankMagics

    ipython.register_magics(RankMagics)
