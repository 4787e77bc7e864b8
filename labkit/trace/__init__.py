"""A recorded run as plain data: computing, communication and memory over time per rank."""

from labkit.trace.folder import read_run, write_run
from labkit.trace.graph import CATEGORIES, MemoryPoint, Operation, RankTrace, Span, Step, Trace
from labkit.trace.measures import Split, split_of

__all__ = [
    "CATEGORIES", "MemoryPoint", "Operation", "RankTrace", "Span", "Split", "Step", "Trace",
    "read_run", "split_of", "write_run",
]  # fmt: skip
