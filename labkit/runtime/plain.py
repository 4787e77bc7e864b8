"""Plain torch.distributed on a world's ranks, for labs that compare it with `Comm`."""

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labkit.runtime.channel import loopback


class Plain:
    """A bare process group with the methods of a `Comm`, without checks or recording.

    `rank` and `size` refer to the group. Without `group`, the constructor creates a group of all
    ranks, so all ranks must call it together. `timeout_s` is the timeout of that group and of its
    subgroups (torch's default is 30 minutes).
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
        """Like `Comm.subgroup`: None on ranks outside the subgroup."""
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=self._timeout_s))
        return Plain(self._timeout_s, group) if dist.get_rank() in ranks else None


def file_store(path: str, timeout_s: float) -> Any:
    """A torch store in the file `path`; waiting too long for a key raises RuntimeError."""
    store = dist.FileStore(path)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class LauncherStore:
    """A TCP store on a free local port, like the store that torchrun opens for its ranks.

    `variables`: environment variables for the ranks, besides the five that every launcher sets.
    """

    def __init__(self) -> None:
        # torch's own socket would listen on every address of the machine.
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1", self.port, is_master=True, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        self.variables = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 uses this store and opens none
            "GLOO_SOCKET_IFNAME": loopback() or "lo",  # keep the ranks' sockets on this machine
        }

    def addresses(self, ranks: int, within_s: float = 30.0) -> dict[str, str]:
        """The ranks' addresses ("127.0.0.1:41234") by key, once `ranks` ranks have registered.
        Raises RuntimeError if that takes more than `within_s` seconds."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            keys = sorted(key for key in self.store.list_keys() if key.startswith("default_pg"))
            if len(keys) >= ranks:
                return {key: _address(self.store.get(key)) for key in keys}
            time.sleep(0.05)
        raise RuntimeError(
            f"only {len(keys)} of {ranks} ranks joined the store within {within_s:g} s; check "
            "that the other ranks started and use this store's address and port"
        )


def _address(value: bytes) -> str:
    """In gloo's bytes, the port precedes the IP address, as in a C `sockaddr_in`."""
    at = value.find(bytes([127, 0, 0, 1]))
    return f"127.0.0.1:{int.from_bytes(value[at - 2 : at], 'big')}"
