"""Does it fit? The memory of a recorded strategy at full scale, without the hardware.

A dry run counts every tensor of a step as a real one does, for a model of any size: its peak is
what a device must hold. The device's own software (the CUDA context, NCCL's buffers, the
allocator's fragments: some GB) comes on top.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from labkit.trace import Trace
from labkit.trace.measures import peak_memory

Size = TypeVar("Size")


def peak_of(trace: Trace) -> dict[str, int]:
    """Bytes by category at the peak of the rank that holds the most.

    Raises ValueError when the trace has no memory.
    """
    peaks = [peak_memory(one) for one in trace.ranks.values() if one.memory]
    if not peaks:
        raise ValueError("this trace has no memory; record with dry_run, or record(detail_step=1)")
    return max(peaks, key=lambda peak: sum(peak.values()))


def fits(trace: Trace, memory_bytes: float) -> bool:
    """Whether every rank fits in so much memory. Raises as `peak_of`."""
    return sum(peak_of(trace).values()) <= memory_bytes


def largest_that_fits(
    record: Callable[[Size], Trace], sizes: Sequence[Size], memory_bytes: float
) -> Size | None:
    """The last of `sizes`, smallest first, whose trace fits; None if none does. Bisection records
    few of them.

    >>> largest_that_fits(lambda depth: dry_run(train, depth, ranks=8), range(1, 97), 80e9)
    """
    fitting, too_large = -1, len(sizes)
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if fits(record(sizes[middle]), memory_bytes):
            fitting = middle
        else:
            too_large = middle
    return sizes[fitting] if fitting >= 0 else None
