"""Plots for notebook cells. Each concept keeps one color across all plots.

recorded runs    timeline, memory, compare (runs side by side), view (with sliders)
communication    mesh, bandwidth, nccl (rings and trees from a log),
                 movement and steps (a collective, step by step)
pipelines        schedule, schedules (side by side on one time axis)
memory           bill (a layer's activations), front (peak memory against recomputation),
                 step_memory, transfers (between memories), loading (weights during compute)
planning         plan, plan_view (with sliders), calibration (predicted against measured step times)
number formats   bits, flip_bits (with buttons), number_line, magnitudes

from labkit import plot

plot.timeline(trace)
plot.compare({"ddp": ddp_trace, "zero-1": zero_trace})
plot.schedule(gpipe(4, 8), figure=figure)  # draws into an existing figure
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
