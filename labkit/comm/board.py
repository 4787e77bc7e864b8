"""The board: a page of shared memory per rank, on which each rank writes the operations it has
in flight, and reads those of the others.

With it, ranks that disagree find out without sending a message. Whoever comes second to a
collective sees that the first called something else under the same number, and says so instead
of hanging (or, worse, adding up garbage). A hang leaves the board as it stood, so the driver
can tell which rank stands where. Nothing here is communication: no byte is sent or counted.

A page has `SLOTS` slots for the latest operations, number k in slot k modulo SLOTS:

    | key 8 | signature 8 | state 1 | since 8 | length 2 | text ... |

and `MARKS` marks, one for each group (or direction of messages): the highest number begun there.

    | stream 4 | number 4 |

A writer clears the key first and sets it last; a reader that sees two answers looks again.
"""

import json
import mmap
import struct
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

SLOTS = 64
SLOT_BYTES = 1024
HEAD = struct.Struct("<QQBdH")
KEY = struct.Struct("<Q")
MARK = struct.Struct("<II")
MARKS = 512
SHARED = 2**32 - 1  # two streams fell on one mark: it tells nothing
PAGE_BYTES = SLOTS * SLOT_BYTES + MARKS * MARK.size
STATE = struct.Struct("<Bd")
STATE_AT = 16
EMPTY, IN_FLIGHT, WAITED_FOR, ENDED = range(4)


class CollectiveMismatch(RuntimeError):
    """Ranks called different operations, or the same with other shapes or dtypes."""


@dataclass(frozen=True)
class Note:
    """What a rank wrote about one operation."""

    group: str
    ranks: tuple[int, ...]  # global ranks that must take part
    seq: int
    what: str  # "all_reduce(sum) float32[1024]"
    source: str
    compares: str  # what must be equal on all ranks
    collective: bool = True
    state: int = IN_FLIGHT
    since_s: float = 0.0

    @property
    def stream(self) -> int:
        """A number for the group (or direction of messages), never 0."""
        return zlib.crc32(f"{self.group}|{self.ranks}".encode()) % (SHARED - 1) + 1

    @property
    def key(self) -> int:
        """The same number on every rank that takes part in this operation, never 0."""
        return self.stream << 32 | self.seq % 2**32

    def sentence(self) -> str:
        number = f"collective {self.seq}" if self.collective else f"message {self.seq}"
        return f"{self.what}, {number} of group {self.group}, at {self.source}"


class Board:
    """Rank `rank`'s view of the board of `size` ranks, kept in the file `path`."""

    def __init__(self, path: Path, size: int, rank: int | None = None):
        self.size, self.rank = size, rank
        self._lock = threading.Lock()
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size * PAGE_BYTES)

    @staticmethod
    def create(path: Path, size: int) -> "Board":
        with open(path, "wb") as file:
            file.truncate(size * PAGE_BYTES)
        return Board(path, size)

    def enter(self, note: Note) -> int:
        """Write that this rank begins `note`; returns its slot.

        Raises CollectiveMismatch when a rank that began the same operation sees it differently.
        """
        assert self.rank is not None
        text = json.dumps(
            [note.group, note.ranks, note.seq, note.what, note.source, note.compares]
            + [note.collective]
        ).encode()
        if len(text) > SLOT_BYTES - HEAD.size:
            room = SLOT_BYTES - HEAD.size - 200  # the ranks of a very large group
            return self.enter(
                Note(note.group, note.ranks[: room // 8], note.seq, note.what[:60], note.source[:60],
                     note.compares[:60], note.collective)
            )  # fmt: skip
        key = note.key
        slot = self._slot(self.rank, key)
        with self._lock:
            KEY.pack_into(self._memory, slot, 0)
            signature = zlib.crc32(note.compares.encode())
            HEAD.pack_into(self._memory, slot, 0, signature, IN_FLIGHT, time.monotonic(), len(text))
            self._memory[slot + HEAD.size : slot + HEAD.size + len(text)] = text
            KEY.pack_into(self._memory, slot, key)
            self._mark(note)
        for other in note.ranks:
            if other != self.rank and other < self.size and self._differs(other, key, signature):
                time.sleep(0.001)  # it may have been writing
                if self._differs(other, key, signature):
                    raise CollectiveMismatch(self._disagreement(note))
        return slot

    def wait(self, slot: int) -> None:
        """Write that this rank now stands still for the operation in `slot`."""
        STATE.pack_into(self._memory, slot + STATE_AT, WAITED_FOR, time.monotonic())

    def leave(self, slot: int) -> None:
        """Write that the operation in `slot` is over."""
        STATE.pack_into(self._memory, slot + STATE_AT, ENDED, time.monotonic())

    def notes(self, rank: int, state: int | None = None) -> list[Note]:
        """What stands on the page of `rank`, oldest first; only those in `state` if given."""
        found = []
        for k in range(SLOTS):
            at = rank * PAGE_BYTES + k * SLOT_BYTES
            key, _, its_state, since_s, length = HEAD.unpack_from(self._memory, at)
            if not key or (state is not None and its_state != state):
                continue
            try:
                text = self._memory[at + HEAD.size : at + HEAD.size + length]
                group, ranks, seq, what, source, compares, collective = json.loads(text)
            except ValueError:  # being written just now
                continue
            found.append(
                Note(
                    group, tuple(ranks), seq, what, source, compares, collective, its_state, since_s
                )
            )
        return sorted(found, key=lambda note: note.since_s)

    def has_begun(self, rank: int, note: Note) -> bool:
        """Whether `rank` has come as far as `note` in its stream; True where it is not known."""
        stream, highest = MARK.unpack_from(self._memory, self._mark_at(rank, note.stream))
        return stream == SHARED or (stream == note.stream and highest >= note.seq)

    def close(self) -> None:
        self._memory.close()

    def _mark(self, note: Note) -> None:
        assert self.rank is not None
        at = self._mark_at(self.rank, note.stream)
        stream, highest = MARK.unpack_from(self._memory, at)
        if stream in (0, note.stream):
            MARK.pack_into(self._memory, at, note.stream, max(highest, note.seq % 2**32))
        else:
            MARK.pack_into(self._memory, at, SHARED, 0)

    @staticmethod
    def _slot(rank: int, key: int) -> int:
        return rank * PAGE_BYTES + ((key >> 32) + key) % SLOTS * SLOT_BYTES

    @staticmethod
    def _mark_at(rank: int, stream: int) -> int:
        return rank * PAGE_BYTES + SLOTS * SLOT_BYTES + stream % MARKS * MARK.size

    def _differs(self, rank: int, key: int, signature: int) -> bool:
        its_key, its_signature, *_ = HEAD.unpack_from(self._memory, self._slot(rank, key))
        return its_key == key and its_signature != signature

    def _disagreement(self, note: Note) -> str:
        assert self.rank is not None
        thing = f"collective {note.seq}" if note.collective else f"message {note.seq}"
        lines = [f"the ranks disagree about {thing} of group {note.group}:"]
        for rank in note.ranks:
            if rank >= self.size:
                continue
            seen = [one for one in self.notes(rank) if one.key == note.key]
            text = f"{seen[0].what}  at {seen[0].source}" if seen else "has not come to it yet"
            lines.append(f"  rank {rank}: {text}")
        lines.append(
            "Every rank of a group must call the same collectives in the same order, with the "
            "same shapes and dtypes."
            if note.collective
            else "A message must be received as it was sent: the same shape and dtype."
        )
        return "\n".join(lines)
