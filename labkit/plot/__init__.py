"""Pictures: the same thing in the same colour, everywhere.

    a recorded run    timeline, memory, view (with sliders); compare and step_memory: several
    a pipeline        schedule, schedules
    communication     bandwidth, movement, steps (one at a time), mesh, nccl
    activations       bill (of a layer, term by term), front (of all choices)
    transfers         transfers, loading
    a plan            plan, plan_view (with sliders), calibration
    number formats    bits, flip_bits (with buttons), number_line, magnitudes

Each returns what a notebook shows as the value of its cell. They are imported when first used. With
`figure=` a picture is drawn into that figure instead of a new one.
"""

from labkit.lazy import lazy

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        "bandwidth": "labkit.plot.bandwidths",
        "bill": "labkit.plot.activations",
        "bits": "labkit.plot.bit_patterns",
        "calibration": "labkit.plot.plans",
        "compare": "labkit.plot.strategies",
        "flip_bits": "labkit.plot.widgets",
        "front": "labkit.plot.activations",
        "loading": "labkit.plot.memory_transfers",
        "magnitudes": "labkit.plot.format_ranges",
        "memory": "labkit.plot.memories",
        "mesh": "labkit.plot.meshes",
        "movement": "labkit.plot.movements",
        "nccl": "labkit.plot.nccl_logs",
        "number_line": "labkit.plot.format_ranges",
        "plan": "labkit.plot.plans",
        "plan_view": "labkit.plot.widgets",
        "schedule": "labkit.plot.pipelines",
        "schedules": "labkit.plot.pipelines",
        "step_memory": "labkit.plot.activations",
        "steps": "labkit.plot.widgets",
        "timeline": "labkit.plot.timelines",
        "transfers": "labkit.plot.memory_transfers",
        "view": "labkit.plot.widgets",
    },
)
