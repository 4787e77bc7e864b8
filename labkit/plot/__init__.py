"""Pictures: the same thing in the same colour, everywhere.

    from labkit import plot

    plot.timeline(trace)   # one step: who computed, communicated and waited when
    plot.memory(trace)     # the step in detail: what held how many bytes
    plot.compare({"ddp": one, "zero": other})
    plot.view(trace)       # all of it, with sliders
    plot.mesh({"dp": 2, "tp": 4})  # ranks on named axes
    plot.bandwidth(sweep)  # bus bandwidth over size, by algorithm: labkit bench collectives
    plot.movement(movement)  # a collective, step by step: which chunk is where
    plot.steps(movement)  # the same, one step at a time

Each returns what a notebook shows as the value of its cell. They are imported when first used.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "bandwidth": "labkit.plot.bandwidths",
    "compare": "labkit.plot.strategies",
    "memory": "labkit.plot.memories",
    "mesh": "labkit.plot.meshes",
    "movement": "labkit.plot.movements",
    "steps": "labkit.plot.stepper",
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
