"""torch.distributed as it is, on the ranks of a world: for labs that show it beside the door.

`Plain` has the names of a `Comm`, so that one program runs on both; nothing looks over its
shoulder. `file_store` is the store that ranks of one machine can meet at.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Plain:
    """A process group without a door. `rank` and `size` count inside the group.

    Without `group` it makes a new one of all ranks, so that `timeout_s` is its own, as it is that
    of subgroups (torch's is half an hour). All ranks make it at once.
    """

    def __init__(self, timeout_s: float, group: Any = None):
        self._timeout_s = timeout_s
        self._group = group = group or dist.new_group(timeout=timedelta(seconds=timeout_s))
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self._group)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> None:
        dist.broadcast(x, group=self._group, group_src=src)

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def send(self, x: torch.Tensor, dst: int) -> None:
        dist.send(x, group=self._group, group_dst=dst)

    def recv(self, x: torch.Tensor, src: int) -> None:
        dist.recv(x, group=self._group, group_src=src)

    def subgroup(self, ranks: Sequence[int]) -> "Plain | None":
        """As `Comm.subgroup`: None on the ranks that are not in it."""
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=self._timeout_s))
        return Plain(self._timeout_s, group) if dist.get_rank() in ranks else None


def file_store(path: str, timeout_s: float) -> Any:
    """torch's store in the file `path`; who waits there for a key in vain gets a RuntimeError."""
    store = dist.FileStore(path)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
