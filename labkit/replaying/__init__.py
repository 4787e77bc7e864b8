"""Programs of ranks under a virtual clock."""

from labkit.replaying.engine import Compute, Deadlock, Issue, Program, Timed, Wait, run
from labkit.replaying.pipeline import bubble, pipeline_programs

__all__ = [
    "Compute",
    "Deadlock",
    "Issue",
    "Program",
    "Timed",
    "Wait",
    "bubble",
    "pipeline_programs",
    "run",
]
