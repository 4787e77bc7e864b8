"""A file that some processes have mapped into their memory, and that soon has no name.

Each opens it, or creates it where it is not there yet, gives it its size (new bytes are zero) and
writes "I have it". The first to see that all have it removes the name; the memory lives as long as
a process has it mapped, so that however the ranks end, nothing stays.
"""

import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch

from labkit.runtime.transports.shm.futex import GONE, HERE, WORD_BYTES, Words, address_of

ALIGNED = 64  # bytes of a line of the cache: where data of a rank begins


class Region:
    """`words` numbers and behind them, from `data` on, `data_bytes` bytes, shared by `parties`
    processes, of which this one is number `me`. Raises RuntimeError where there is no room."""

    def __init__(self, path: Path, me: int, parties: int, words: int, data_bytes: int):
        here = range(words, words + parties)  # "I have it", "I gave up"
        notes = range(words + parties, words + 2 * parties)  # "I sleep"
        self.data = -(-notes.stop * WORD_BYTES // ALIGNED) * ALIGNED
        self.memory = _map(path, self.data + data_bytes)
        self.words = Words(self.memory, here, notes, me)
        self._own = here[me]
        self._start = address_of(self.memory) + self.data
        self.words.announce(self._own, HERE)
        if all(self.words[i] for i in here):
            with suppress(OSError):  # two may see it at once
                path.unlink()

    def give_up(self) -> None:
        """Tell the others not to wait for this process any more."""
        self.words.announce(self._own, GONE)

    def address(self, begin: int) -> int:
        """Of the data's byte `begin`."""
        return self._start + begin

    def tensor(self, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements that begin at the data's byte `begin`."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        with torch.inference_mode(False):  # it may be written to later, outside such a block
            return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=self.data + begin)


def _map(path: Path, nbytes: int) -> mmap.mmap:
    file = None
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if hasattr(os, "posix_fallocate"):  # else a full disk would be known by a crash only
            os.posix_fallocate(file, 0, nbytes)
        else:
            os.ftruncate(file, nbytes)
        return mmap.mmap(file, nbytes)
    except OSError as error:
        raise RuntimeError(
            f"{path.parent} has no room for {nbytes / 1e6:.1f} MB that the ranks would share "
            f'({error.strerror}); make room, or do without: World(..., transport="gloo")'
        ) from error
    finally:
        if file is not None:
            os.close(file)
