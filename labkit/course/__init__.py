"""The labs: built from one source each, and the library's own code shown in them."""

from labkit.course.source import show

__all__ = ["show"]
