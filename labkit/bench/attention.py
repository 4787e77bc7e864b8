"""Time and peak memory of one attention layer, forward and backward, by sequence length:
`PlainAttention` stores all scores, labkit's and torch's flash attention store none. labkit's
runs in Python, one tile at a time; torch's is a single kernel.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labkit.bench import harness
from labkit.bench.harness import StepTimes
from labkit.memory.flash_attention import flash
from labkit.models.attention import PlainAttention
from labkit.runtime.progress import progress
from labkit.trace.recording import record

Core = Callable[[Tensor, Tensor, Tensor], Tensor]

ROWS, HEADS, WIDTH = 1, 8, 64
TILES = {"cpu": 64, "cuda": 512}  # a GPU needs larger tiles to be busy
LENGTHS = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}


def bench_attention(turns: int = 9, device: str | None = None) -> list[StepTimes]:
    """Time each core for each sequence length, one `StepTimes` per length."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return [_at(length, turns, where) for length in LENGTHS[where.type]]


def _at(length: int, turns: int, where: torch.device) -> StepTimes:
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    shape = (3, ROWS, HEADS, length, WIDTH)
    qkv = torch.randn(shape, dtype=dtype, device=where).requires_grad_()
    cores: dict[str, Core] = {
        "plain": PlainAttention(),
        "flash": partial(flash, causal=True, tile=TILES[where.type]),
        "torch": partial(scaled_dot_product_attention, is_causal=True),
    }
    steps = {name: partial(_step, core, qkv) for name, core in cores.items()}
    peaks = {name: _peak_bytes(step, where) for name, step in progress(steps.items(), "peaks")}
    sync = harness.sync_of(where)
    cases = {name: partial(harness.seconds_of, step, 2, sync, sync) for name, step in steps.items()}
    seconds = harness.take_turns(cases, turns, f"attention over {length} positions")
    about = {
        "length": length, "shape": f"{ROWS} x {HEADS} heads of {WIDTH}", "dtype": str(dtype)[6:],
        "device": harness.device_name(where),
    }  # fmt: skip
    return StepTimes(about, seconds, [], {"peak_bytes": peaks})


def _step(core: Core, qkv: Tensor) -> None:
    core(*qkv).sum().backward()
    qkv.grad = None


def _peak_bytes(step: Callable[[], None], where: torch.device) -> int:
    """The most that a step allocates, gradients included."""
    gc.collect()
    step()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        before_bytes = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        step()
        return torch.cuda.max_memory_allocated(where) - before_bytes
    with record(detail_step=0) as trace:
        step()
    held_bytes = [sum(point.held_bytes) for point in trace.ranks[0].memory]
    return max(held_bytes) - held_bytes[0]


def table(measured: Sequence[StepTimes]) -> Table:
    """One row per length and core."""
    about = measured[0].about
    shown = harness.titled(
        f"Attention, {about['shape']}, {about['dtype']}, on {about['device']}",
        "Forward and backward. Peak memory: beyond what was allocated before the step.",
        ("length", "core", "ms", "/ torch", "peak MB"), ("core",),
    )  # fmt: skip
    for times in measured:
        for name, nbytes in times.figures["peak_bytes"].items():
            ratio = times.ratio(name, "torch")[1]
            cells = f"{times.ms(name):.2f}", f"{ratio:.2f}", f"{nbytes / 1e6:.1f}"
            shown.add_row(f"{times.about['length']:,}", name, *cells)
        shown.add_section()
    return shown
