"""The board: a page of shared memory per rank, in which the rank records its operations in flight
for other ranks and the driver to read.

Ranks thus detect a mismatch without a message: the second rank to enter a collective sees that the
first called a different collective with the same number, and raises an error instead of hanging or
reducing garbage. After a hang, the driver reads where each rank is. Notes do not count as traffic.

A page contains notes on the latest operations, each in slot (stream + number) modulo SLOTS:

    | key 8 | since 8 | signature 4 | length 2 | state 1 | text ... |

and MARKS marks, one per stream (group or message direction): the highest number begun there.

    | number 4 | stream 4 |   (one word)

Pages have no lock, so a reader must detect a half-written note. The writer clears the key first and
sets it last; a reader drops a note if the key changed during the read. State and time are updated
with one atomic store each (not by `struct.pack_into`, which writes zeros first). With more than
`SLOTS` operations in flight, the oldest notes are overwritten, but `wait` writes its note again.
"""

import json
import mmap
import struct
import threading
import time
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SLOTS = 64
SLOT_BYTES = 2048  # enough for the rank list of the largest world
HEAD = struct.Struct("<QdIHB")
SINCE, STATE = 8, 22  # byte offsets in HEAD
MARK_BYTES = 8
MARKS = 512
SHARED = 2**32 - 1  # two streams share this mark, so the highest number is unknown
PAGE_BYTES = SLOTS * SLOT_BYTES + MARKS * MARK_BYTES
MAX_TEXT_BYTES = 200  # for an operation's description, and for its source line
MAX_RANKS = 256  # listed in a note
ALL_STATES = EMPTY, IN_FLIGHT, WAITED_FOR, ENDED, FAILED = range(5)


class CollectiveMismatch(RuntimeError):
    """Raised if ranks call different operations, or the same with different shapes or dtypes."""


@dataclass(frozen=True)
class Note:
    """One rank's record of one operation."""

    group: str
    ranks: tuple[int, ...]  # global ranks that must take part
    seq: int
    what: str  # "all_reduce(sum) float32[1024]"
    source: str
    compares: str = ""  # must be equal on all ranks; the board stores a checksum
    collective: bool = True
    state: int = IN_FLIGHT
    since_s: float = 0.0

    @property
    def stream(self) -> int:
        """Hash of the group (or message direction), never 0."""
        return zlib.crc32(self.group.encode()) % (SHARED - 1) + 1

    @property
    def key(self) -> int:
        """Key of the operation, equal on all participating ranks, never 0."""
        return self.stream << 32 | self.seq % 2**32

    @property
    def label(self) -> str:
        kind = "collective" if self.collective else "message"
        return f"{kind} {self.seq} of group {self.group}"

    def sentence(self) -> str:
        """ "all_reduce(sum) float32[4], collective 3 of group default, at train.py:12 in step"."""
        return f"{self.what}, {self.label}, at {self.source}"


class Board:
    """The board of `size` ranks in file `path`, as used by rank `rank`, or by the driver (-1)."""

    def __init__(self, path: Path, size: int, rank: int = -1):
        self.size, self.rank = size, rank
        self._lock = threading.Lock()
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size * PAGE_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._times = memoryview(self._memory).cast("d")

    @staticmethod
    def create(path: Path, size: int) -> "Board":
        with open(path, "wb") as file:
            file.truncate(size * PAGE_BYTES)
        return Board(path, size)

    def enter(self, note: Note, state: int = IN_FLIGHT) -> None:
        """Record that this rank begins `note`'s operation, blocking if `state` is WAITED_FOR.
        Raises CollectiveMismatch if another rank recorded the operation differently."""
        key, signature = note.key, zlib.crc32(note.compares.encode())
        with self._lock:
            self._mark(note)
            self._write(note, key, signature, state)
        for other in note.ranks:
            if other != self.rank and other < self.size and self._differs(other, key, signature):
                time.sleep(0.001)  # the rank may have been mid-write
                if self._differs(other, key, signature):
                    raise CollectiveMismatch(self._disagreement(note))

    def wait(self, note: Note) -> None:
        """Record that this rank now blocks on `note`'s operation, already recorded by `enter`."""
        with self._lock:
            if not self._set_state(note.key, WAITED_FOR):
                self._write(note, note.key, zlib.crc32(note.compares.encode()), WAITED_FOR)

    def leave(self, note: Note, failed: bool = False) -> None:
        """Record that `note`'s operation has ended or, if `failed`, has failed."""
        with self._lock:
            self._set_state(note.key, FAILED if failed else ENDED)

    def notes(self, rank: int, states: Collection[int] = ALL_STATES) -> list[Note]:
        """The notes of `rank` whose state is in `states`, by time of the latest state change."""
        first = rank * PAGE_BYTES
        every = range(first, first + SLOTS * SLOT_BYTES, SLOT_BYTES)
        notes = [note for slot in every if (note := self._read(slot, states))]
        return sorted(notes, key=lambda note: note.since_s)

    def has_begun(self, rank: int, note: Note) -> bool:
        """Whether `rank` has begun the operation or a later one of its stream; True if unknown."""
        stream, highest = divmod(self._words[self._mark_at(rank, note.stream) // 8], 2**32)
        return stream == SHARED or (stream == note.stream and highest >= note.seq)

    def close(self) -> None:
        self._words.release()
        self._times.release()
        self._memory.close()

    def _read(self, slot: int, states: Collection[int]) -> Note | None:
        """The note in this slot; None if its state is not in `states` or the slot is mid-write."""
        key, since_s, _, length, state = HEAD.unpack_from(self._memory, slot)
        if not key or state not in states:
            return None
        text = self._memory[slot + HEAD.size : slot + HEAD.size + length]
        if self._words[slot // 8] != key:
            return None
        try:
            group, ranks, seq, what, source, collective = json.loads(text)
        except ValueError:  # the key was cleared and set again while we read
            return None
        return Note(group, tuple(ranks), seq, what, source, "", collective, state, since_s)

    def _write(self, note: Note, key: int, signature: int, state: int) -> None:
        what, source = (_truncated(part) for part in (note.what, note.source))
        entry = [note.group, note.ranks[:MAX_RANKS], note.seq, what, source, note.collective]
        text = _to_json(entry).encode()
        assert len(text) <= SLOT_BYTES - HEAD.size, f"no room for {note}"
        slot = self._slot(self.rank, key)
        self._words[slot // 8] = 0
        HEAD.pack_into(self._memory, slot, 0, time.monotonic(), signature, len(text), state)
        self._memory[slot + HEAD.size : slot + HEAD.size + len(text)] = text
        self._words[slot // 8] = key

    def _set_state(self, key: int, state: int) -> bool:
        """Set the note's state; return False if its slot has been overwritten."""
        slot = self._slot(self.rank, key)
        if self._words[slot // 8] != key:
            return False
        self._times[(slot + SINCE) // 8] = time.monotonic()
        self._memory[slot + STATE] = state
        return True

    def _mark(self, note: Note) -> None:
        word = self._mark_at(self.rank, note.stream) // 8
        stream, highest = divmod(self._words[word], 2**32)
        if stream in (0, note.stream):
            self._words[word] = note.stream << 32 | max(highest, note.seq % 2**32)
        else:
            self._words[word] = SHARED << 32

    @staticmethod
    def _slot(rank: int, key: int) -> int:
        return rank * PAGE_BYTES + ((key >> 32) + key) % SLOTS * SLOT_BYTES

    @staticmethod
    def _mark_at(rank: int, stream: int) -> int:
        return rank * PAGE_BYTES + SLOTS * SLOT_BYTES + stream % MARKS * MARK_BYTES

    def _differs(self, rank: int, key: int, signature: int) -> bool:
        seen_key, _, seen_signature, *_ = HEAD.unpack_from(self._memory, self._slot(rank, key))
        return seen_key == key and seen_signature != signature

    def _disagreement(self, note: Note) -> str:
        lines = [f"the ranks disagree about {note.label}:"]
        for rank in (rank for rank in note.ranks if rank < self.size):
            seen = [written for written in self.notes(rank) if written.key == note.key]
            text = f"{seen[0].what}  at {seen[0].source}" if seen else "has not called it yet"
            lines.append(f"  rank {rank}: {text}")
        lines.append(
            "Every rank of a group must call the same collectives in the same order, with the "
            "same shapes and dtypes."
            if note.collective
            else "A message must be received with the shape and dtype that the sender used."
        )
        return "\n".join(lines)


_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _truncated(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= MAX_TEXT_BYTES:
        return data.decode()
    half = MAX_TEXT_BYTES // 2
    return f"{data[:half].decode(errors='ignore')} ... {data[-half:].decode(errors='ignore')}"
