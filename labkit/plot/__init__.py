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
    plot.nccl(log)  # rings and trees of what NCCL printed

Each returns what a notebook shows as the value of its cell. They are imported when first used.
"""

from labkit.lazy import lazy

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "bandwidth": "labkit.plot.bandwidths",
        "compare": "labkit.plot.strategies",
        "memory": "labkit.plot.memories",
        "mesh": "labkit.plot.meshes",
        "movement": "labkit.plot.movements",
        "nccl": "labkit.plot.nccl_logs",
        "steps": "labkit.plot.stepper",
        "timeline": "labkit.plot.timelines",
        "view": "labkit.plot.widget",
    },
)
