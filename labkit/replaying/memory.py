"""Does it fit? The memory of a recorded strategy at full scale; the device's own software (the CUDA
context, NCCL's buffers, fragments: some GB) comes on top.
"""

from bisect import bisect_left
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
    fitting = bisect_left(sizes, True, key=lambda size: not fits(record(size), memory_bytes))
    return sizes[fitting - 1] if fitting else None
