"""Constant-size memory, allocated once and reused in every step, whatever the model's size.

ZeRO-R has two techniques besides partitioned activations (P_a): fused buffers have a constant size
(C_B: DDP's and ZeRO's buckets, MasterWeights' chunks), and long-lived tensors get a separate
block, which avoids fragmentation (M_D: ConstantBuffer, for offloaded activations). Backward needs
forward's last tensors first, so a stack suffices:

    forward   | a | b | c |          free          |
                          ^ top
    backward  | a | b |              free          |

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, sections 5.2 (C_B) and 5.3 (M_D).
"""

import weakref

import torch

ALIGNED_BYTES = 64  # a cache line: kernels are slow on unaligned tensors, or refuse them

_host_memory: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def is_host_memory(x: torch.Tensor) -> bool:
    """Whether `x` is offloaded and does not count as device memory, even if the device is a CPU."""
    return bool(_host_memory) and x.untyped_storage() in _host_memory


class ConstantBuffer:
    """A stack of slices in one block of `nbytes` of host memory. The space of a freed slice can be
    reused once all slices above it are free. `pinned`: page-locked, for asynchronous copies."""

    def __init__(self, nbytes: int, pinned: bool = False):
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes}: choose 0 bytes or more")
        self.nbytes = nbytes
        self._block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._starts: list[int] = []  # starts of the slices in use, bottom first
        self._free: set[int] = set()  # starts of freed slices below the top
        self._top = 0
        _host_memory.add(self._block.untyped_storage())

    @property
    def used_bytes(self) -> int:
        return self._top

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Take a slice, uint8 [nbytes]; return None if it does not fit."""
        if self._top + nbytes > self.nbytes:
            return None
        start = self._top
        self._starts.append(start)
        self._top = start + -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return self._block[start : start + nbytes]

    def give_back(self, taken: torch.Tensor) -> None:
        """Free a slice. Raises ValueError if it is not from this buffer or is already free."""
        start = int(taken.storage_offset())
        if start not in self._starts or start in self._free:
            raise ValueError(
                f"the slice at byte {start} was not taken from this buffer, or was already "
                "returned; return each slice once"
            )
        self._free.add(start)
        while self._starts and self._starts[-1] in self._free:
            self._top = self._starts.pop()
            self._free.remove(self._top)
