"""Recording of a running program: spans per module, communication, memory by category."""

from labkit.trace.recording.movement import watch_collective
from labkit.trace.recording.recorder import metric, span
from labkit.trace.recording.session import OnRank, Recording, record

__all__ = ["OnRank", "Recording", "metric", "record", "span", "watch_collective"]
