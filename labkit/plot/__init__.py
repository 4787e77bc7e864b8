"""Pictures: the same thing in the same colour, everywhere.

    from labkit import plot

    plot.timeline(trace)   # one step: computing, communication and waits of each rank
    plot.memory(trace)     # the step in detail: bytes by category
    plot.compare({"ddp": one, "zero": other})
    plot.view(trace)       # a recorded run, with sliders
    plot.mesh({"dp": 2, "tp": 4})  # ranks on named axes
    plot.bandwidth(sweep)  # bus bandwidth over size, by algorithm: labkit bench collectives
    plot.movement(movement)  # a collective, step by step: where each chunk is
    plot.steps(movement)  # the same, one step at a time
    plot.bill({"none": bill})  # activations of a layer, term by term
    plot.front(plans, pick)  # memory and time of all choices
    plot.step_memory({"none": trace, "full": other})  # one step under each
    plot.nccl(log)  # rings and trees of an NCCL log
    plot.transfers(measured)  # ways to move a tensor, measured beside predicted
    plot.loading({"pipelined": run})  # transfers over the bus while blocks computed
    plot.plan(plan)  # layouts on a cluster: where their time goes, and the map of tp and pp
    plot.plan_view(plan)  # the same, one layout at a time, with sliders
    plot.schedule(gpipe(4, 8))  # a pipeline from its costs, or a recorded one
    plot.schedules({"GPipe": one, "1F1B": other})  # several, on one time axis
    plot.bits(0.1, "fp32", "bf16")  # sign, exponent and fraction of a number
    plot.flip_bits(0.1, "fp16")  # the same, with bits to flip
    plot.calibration()  # step times that others measured beside labkit's predictions
    plot.number_line()  # what each number format can hold

Each returns what a notebook shows as the value of its cell. They are imported when first used. With
`figure=` a picture is drawn into that figure instead of a new one.
"""

from labkit.lazy import lazy

HOMES = {
    "activations": ("bill", "front", "step_memory"),
    "bandwidths": ("bandwidth",),
    "bit_patterns": ("bits",),
    "format_ranges": ("magnitudes", "number_line"),
    "memories": ("memory",),
    "memory_transfers": ("loading", "transfers"),
    "meshes": ("mesh",),
    "movements": ("movement",),
    "nccl_logs": ("nccl",),
    "pipelines": ("schedule", "schedules"),
    "plans": ("calibration", "plan"),
    "strategies": ("compare",),
    "timelines": ("timeline",),
    "widgets": ("flip_bits", "plan_view", "steps", "view"),
}
__all__, __getattr__, __dir__ = lazy(
    __name__, {name: f"{__name__}.{home}" for home, names in HOMES.items() for name in names}
)
