"""The most memory that an answer holds at once: `labkit.memory.peak`."""

from labkit.memory.peak import PeakMemory

__all__ = ["PeakMemory"]
