"""What is left of a `Comm` that was pickled: who it was over. A process group does not travel.

    rank 0   model = tensor_parallel(GPT(...), comm)
             torch.save(model, "part0.pt")     or     return model, out of world.run
                                     │
    there    loaded                  ▼         its parameters say which part of the whole they are,
             loaded(tokens)          RuntimeError: nobody is there to talk to

A model that was edited for one rank asks nobody, and computes. To save a model so that other ranks
or a plain one can have it, write a checkpoint (labkit/checkpoints) or its `full_state_dict`.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DetachedComm:
    """`rank`, `size` and `ranks` are those of the `Comm`. All else that a `Comm` has raises
    RuntimeError."""

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
