"""Pictures: the same thing in the same colour, everywhere.

    from labkit import plot

    plot.timeline(trace)   # one step: who computed, communicated and waited when
    plot.memory(trace)     # the step in detail: what held how many bytes
    plot.compare({"ddp": one, "zero": other})
    plot.view(trace)       # all of it, with sliders
    plot.mesh({"dp": 2, "tp": 4})  # ranks on named axes
    plot.nccl(log)  # rings and trees of what NCCL printed

Each returns what a notebook shows as the value of its cell. They are imported when first used.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "compare": "labkit.plot.strategies",
    "memory": "labkit.plot.memories",
    "mesh": "labkit.plot.meshes",
    "nccl": "labkit.plot.nccl_logs",
    "timeline": "labkit.plot.timelines",
    "view": "labkit.plot.widget",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"labkit.plot has no {name!r}; it has {', '.join(_HOME)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
