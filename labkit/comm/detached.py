"""What is left of a `Comm` that was pickled: a process group does not travel.

A model that was edited for one rank and pickled computes, and its parameters say which part of the
whole they are; only communication raises. For other ranks, write a checkpoint.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DetachedComm:
    """The `rank`, `size` and `ranks` of the `Comm`; its operations raise RuntimeError."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    is_world: bool = False  # all ranks: a DDP that is loaded by others takes theirs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look for what is not there
            raise AttributeError(name)
        raise RuntimeError(
            f"{name}: this Comm of rank {self.rank} over ranks {list(self.ranks)} was pickled, and "
            "a process group does not travel; build the model anew inside World.run, edit it there "
            "with a Comm of its ranks, and load a checkpoint, or the parts with load_state_dict"
        )
