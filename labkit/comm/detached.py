"""The placeholder for a pickled `Comm`, since a process group cannot be pickled.

An unpickled parallel model still computes, and its parameters keep their shard marks; communication
raises an error. To load a model on different ranks, save a checkpoint instead.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DetachedComm:
    """The `rank`, `size` and `ranks` of the original `Comm`; operations raise RuntimeError."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    is_world: bool = False  # over all ranks; a loaded DDP uses the new world's ranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle probe for optional methods
            raise AttributeError(name)
        raise RuntimeError(
            f"{name}: this Comm of rank {self.rank} over ranks {list(self.ranks)} was pickled, "
            "and a process group cannot be pickled; rebuild the model inside World.run, "
            "parallelize it there with a new Comm, and load a checkpoint, or the shards with "
            "load_state_dict"
        )
