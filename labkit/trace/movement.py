"""The movement of data in a collective, step by step. Every rank fills its chunks with distinct
integers; any sum of these integers can be decoded (see `number`). As in the alpha-beta model, a
rank sends at most one message and receives at most one per step, after waiting for its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

MAX_RANKS = 8  # 2 x 8 digits of 4 bits, each counting up to 15
Key = tuple[int, int, int, int]  # a message's source, target, tag and sequence number
Sent = tuple[tuple[int | None, int], ...]  # (chunk, or None outside the buffer; value)
Kind = Literal["send", "recv", "wait", "end"]


@dataclass(frozen=True)
class Content:
    """Decoded content of a chunk. `counts`: how many times the sum includes each rank's integer (()
    for an invalid sum). `chunk`: the chunk that the integers belong to (None if empty or mixed)."""

    counts: tuple[int, ...]
    chunk: int | None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose integers are in the sum."""
        return tuple(rank for rank, count in enumerate(self.counts) if count)

    @property
    def is_empty(self) -> bool:
        return bool(self.counts) and not any(self.counts)

    def is_right_in(self, place: int) -> bool:
        """Whether this is valid in chunk `place`: a sum of its integers, each at most once."""
        return self.is_empty or (self.chunk == place and max(self.counts) == 1)


@dataclass(frozen=True)
class Message:
    """A message from rank `source` to `target`. `contents` are pairs (place, content), where place
    is the chunk in the sender's buffer (None outside the buffer)."""

    source: int
    target: int
    contents: tuple[tuple[int | None, Content], ...]

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks in the message, identified by place or, outside the buffer, by content."""
        chunks = (content.chunk if place is None else place for place, content in self.contents)
        return tuple(chunk for chunk in chunks if chunk is not None)


@dataclass(frozen=True)
class Frame:
    """One step: its messages, and the contents after the step, `held[rank][chunk]`."""

    messages: tuple[Message, ...]
    held: tuple[tuple[Content, ...], ...]


@dataclass(frozen=True)
class Movement:
    """A recorded collective on `size` ranks: initial contents and steps."""

    name: str
    size: int
    first: tuple[tuple[Content, ...], ...]
    frames: tuple[Frame, ...]

    @property
    def sent_chunks(self) -> list[int]:
        """The number of chunks that each rank sends."""
        messages = [message for frame in self.frames for message in frame.messages]
        return [
            sum(len(message.contents) for message in messages if message.source == rank)
            for rank in range(self.size)
        ]

    def __repr__(self) -> str:
        most = max(self.sent_chunks)
        return (
            f"{self.name} on {self.size} ranks: {len(self.frames)} steps; "
            f"the busiest rank sends {most} chunk{'s' * (most != 1)}; a buffer has {self.size}"
        )


@dataclass(frozen=True)
class Note:
    """One action of a rank: it posted a send or a receive, waited for a message, or ended.
    `buffer`: the contents of the rank's buffer before the action."""

    kind: Kind
    buffer: tuple[int, ...]
    message: Key = (0, 0, 0, 0)
    sent: Sent = ()


def number(rank: int, chunk: int, size: int) -> int:
    """The int64 of `rank` in chunk `chunk`: D^rank + D^(n + chunk); n = `size`, D = 2^(64 // (2n)).
    In a sum, the lower n digits count integers per rank and the upper n digits count integers per
    chunk, which reveals an integer that was added twice or to the wrong chunk."""
    bits = 64 // (2 * size)
    value = (1 << rank * bits) | (1 << (size + chunk) * bits)
    return value - (1 << 64) if value >> 63 else value


def content_of(value: int, size: int) -> Content:
    """Decode a sum of the integers from `number`."""
    bits, value = 64 // (2 * size), value & (1 << 64) - 1
    digits = [value >> k * bits & (1 << bits) - 1 for k in range(2 * size)]
    counts, chunks = digits[:size], digits[size:]
    if sum(counts) != sum(chunks) or value >> 2 * size * bits:
        return Content((), None)
    present = [chunk for chunk, count in enumerate(chunks) if count]
    return Content(tuple(counts), present[0] if len(present) == 1 else None)


def movement_of(name: str, logs: Sequence[Sequence[Note]]) -> Movement:
    """Build the movement from every rank's notes."""
    size = len(logs)
    step_of, clocks = _in_steps(logs)
    steps = max(step_of.values(), default=0)
    held = [_held(log, clock, steps, size) for log, clock in zip(logs, clocks)]
    messages: list[list[Message]] = [[] for _ in range(steps)]
    for note in chain.from_iterable(logs):
        if note.kind == "send" and note.message in step_of:
            contents = tuple((place, content_of(value, size)) for place, value in note.sent)
            source, target, _, _ = note.message
            messages[step_of[note.message] - 1].append(Message(source, target, contents))
    frames = [Frame(tuple(messages[k]), tuple(rows[k] for rows in held)) for k in range(steps)]
    return Movement(name, size, tuple(_row(log[0].buffer, size) for log in logs), tuple(frames))


def _row(cells: Sequence[int], size: int) -> tuple[Content, ...]:
    return tuple(content_of(value, size) for value in cells)


def _in_steps(logs: Sequence[Sequence[Note]]) -> tuple[dict[Key, int], list[list[int]]]:
    """The step of each message, from 1, and each rank's clock after each note: the last step that
    the rank awaited. A message gets the first step, after both ends' clocks when they posted it, in
    which the sender sends nothing else and the receiver receives nothing else."""
    step_of: dict[Key, int] = {}
    posted: dict[Key, list[int]] = {}
    sending, receiving = set[tuple[int, int]](), set[tuple[int, int]]()
    clocks: list[list[int]] = [[] for _ in logs]

    def schedule(key: Key) -> int:
        if key not in step_of:
            source, target, step = key[0], key[1], max(posted[key]) + 1
            while (source, step) in sending or (target, step) in receiving:
                step += 1
            sending.add((source, step))
            receiving.add((target, step))
            step_of[key] = step
        return step_of[key]

    moved = True
    while moved:
        moved = False
        for log, clock in zip(logs, clocks):
            for note in log[len(clock) :]:
                now = clock[-1] if clock else 0
                if note.kind in ("send", "recv"):
                    posted.setdefault(note.message, []).append(now)
                elif note.kind == "wait":
                    if len(posted.get(note.message, [])) < 2:
                        break  # the other end has not posted yet
                    now = max(now, schedule(note.message))
                clock.append(now)
                moved = True
    for key in posted:  # messages that no rank waited for
        schedule(key)
    return step_of, clocks


def _held(
    log: Sequence[Note], clock: Sequence[int], steps: int, size: int
) -> list[tuple[Content, ...]]:
    """A rank's contents after each step: per chunk, the latest value that was buffered or sent."""
    cells, before = list(log[0].buffer), log[0].buffer
    after: list[tuple[Content, ...]] = []
    for note, step in zip(log, clock):
        for chunk, (old, new) in enumerate(zip(before, note.buffer)):
            if old != new:
                cells[chunk] = new
        before = note.buffer
        for place, value in note.sent:
            label = content_of(value, size).chunk
            if place is None and label is not None:
                cells[label] = value
        # no message of `step` had arrived before this wait
        after += [_row(cells, size)] * (step - 1 - len(after))
    return after + [_row(cells, size)] * (steps - len(after))
