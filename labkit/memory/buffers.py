"""Memory of constant size, allocated once and used in every step, however large the model is.

ZeRO-R has two rules for memory that is not a model's states or activations: fused buffers have a
constant size (C_B: DDP's and ZeRO's buckets, MasterWeights' chunks), and what lives long has memory
of its own, so that it leaves no holes in the rest (M_D: ConstantBuffer, for offloaded activations).
Backward wants last what forward made first. So a stack is enough:

    forward   | a | b | c |          free          |
                          ^ top
    backward  | a | b |              free          |

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, sections 5.2 (C_B) and 5.3 (M_D).
"""

import weakref

import torch

ALIGNED_BYTES = 64  # a cache line: kernels are slower on, or refuse, tensors that lie across

_host_memory: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def is_host_memory(x: torch.Tensor) -> bool:
    """Whether `x` was offloaded: it does not count as the device's, even if a CPU plays the
    device."""
    return bool(_host_memory) and x.untyped_storage() in _host_memory


class ConstantBuffer:
    """One block of host memory of `nbytes`, from which pieces are taken and given back, the last
    first; one below the top is free when all above it are. `pinned`: a GPU can copy while it
    computes."""

    def __init__(self, nbytes: int, pinned: bool = False):
        if nbytes < 0:
            raise ValueError(f"a buffer of {nbytes} bytes: give 0 or more")
        self.nbytes = nbytes
        self._block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._pieces: list[int] = []  # where each begins, bottom first
        self._free: set[int] = set()  # of those, what was given back below the top
        self._top = 0
        _host_memory.add(self._block.untyped_storage())

    @property
    def used_bytes(self) -> int:
        return self._top

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A piece, uint8 [nbytes]; None where there is no room for it."""
        if self._top + nbytes > self.nbytes:
            return None
        start = self._top
        self._pieces.append(start)
        self._top = start + -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return self._block[start : start + nbytes]

    def give_back(self, piece: torch.Tensor) -> None:
        """Free a piece. Raises ValueError for one that is not taken."""
        start = int(piece.storage_offset())
        if start not in self._pieces or start in self._free:
            raise ValueError(
                f"the piece at byte {start} was not taken from this buffer, or was given back "
                "before; give back each piece once"
            )
        self._free.add(start)
        while self._pieces and self._pieces[-1] in self._free:
            self._top = self._pieces.pop()
            self._free.remove(self._top)
