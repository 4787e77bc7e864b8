"""The placeholder for a pickled `Comm`: a process group cannot be pickled.

A pickled parallel model still computes, and its parameters keep the marks of their shards; only
communication raises. To load a model on other ranks, save a checkpoint instead.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DetachedComm:
    """The `rank`, `size` and `ranks` of the original `Comm`; its operations raise RuntimeError."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    is_world: bool = False  # over all ranks: a DDP loaded elsewhere uses the ranks there

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle probe for optional methods
            raise AttributeError(name)
        raise RuntimeError(
            f"{name}: this Comm of rank {self.rank} over ranks {list(self.ranks)} was pickled, "
            "and a process group cannot be pickled; rebuild the model inside World.run, edit it "
            "there with a Comm of its ranks, and load a checkpoint, or the shards with "
            "load_state_dict"
        )
