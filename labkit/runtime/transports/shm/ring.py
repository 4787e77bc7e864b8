"""Messages through shared memory: a ring of bytes from each rank to each other.

    words:  written (by the sender) | read (by the receiver) | taken 0, 1, ... (by the receiver)
    ring:   ... | tag, length | data ...... | tag, length | data ... |
                 ^ read                              written ^

The sender appends as far as there is room; the receiver takes out what is there. Both count bytes
since the beginning. A message longer than the ring flows through it.

The ring is in order, but a receiver may want the message under tag 1 before that under tag 0. What
comes out and is not asked for yet is kept in private memory until it is. A message is *taken* when
a receive has it: then its number is written into `taken`, and only then is its send over, as over
a wire without a buffer. (So two ranks that both send first wait for each other, however short the
messages.) Copies: S on the sender, S on the receiver; once more for what was kept.
"""

import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from labkit.runtime.transports.shm.region import Region
from labkit.runtime.transports.wire import Lane, LaneWork

RING_BYTES = 1 << 20  # a multiple of a head's
HEAD = struct.Struct("<QQ")  # the tag, and the bytes that follow
MOST_UNTAKEN = 2048  # messages of one direction; one more waits for the first to be taken
GRAIN_BYTES = 1 << 18  # of a message that flows through: worth waking the other end for
WRITTEN, READ, TAKEN = 0, 1, 2
SENDER, RECEIVER = 0, 1


class Ring:
    """One direction between two ranks, seen from one of its ends."""

    def __init__(self, path: Path, end: int, timeout_s: float):
        self._region = Region(path, end, 2, TAKEN + MOST_UNTAKEN, RING_BYTES)
        self.words = self._region.words
        self.timeout_s = timeout_s
        self._lock = threading.Lock()  # threads of this process use the ring in turns
        self._lane: Lane | None = None

    def wait(self, word: int, value: int, until_s: float) -> None:
        if not self.words.wait(word, value, until_s, (SENDER, RECEIVER)):
            if self.gave_up():
                raise RuntimeError("the other rank, or this one, gave up after an error")
            raise RuntimeError(f"Timed out waiting {self.timeout_s:g} s for the other rank")

    def gave_up(self) -> bool:
        """Whether one of the ends did."""
        return self.words.gave_up(SENDER) or self.words.gave_up(RECEIVER)

    def give_up(self) -> None:
        """Nothing more is moved; the other end must not wait."""
        with self._lock:
            self._region.give_up()

    def _later(self, function: Callable[[], None]) -> LaneWork:
        if self._lane is None:
            self._lane = Lane("labkit message")
        return self._lane.submit(function)

    def _head(self, position: int) -> int:
        """Where the head at `position` is in the memory. (It never wraps around the end.)"""
        return self._region.data + position % RING_BYTES

    def _spans(self, position: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(address in the ring, bytes before it, its bytes) from `position` on, around the end."""
        done = 0
        while done < nbytes:
            at = (position + done) % RING_BYTES
            some = min(nbytes - done, RING_BYTES - at)
            yield self._region.address(at), done, some
            done += some


def taken_word(number: int) -> int:
    """Where the reader says that it has taken message `number`."""
    return TAKEN + number % MOST_UNTAKEN


def padded(nbytes: int) -> int:
    """So that the next head is aligned."""
    return -(-nbytes // HEAD.size) * HEAD.size
