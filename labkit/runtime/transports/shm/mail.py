"""The two ends of a ring (ring.py): an outbox on the sender's side, an inbox on the receiver's.

The caller itself copies what fits, or what it waits for. The rest is done by a thread of the
ring, so that a message travels while its sender and its receiver do something else.
"""

import time
from collections import defaultdict, deque
from functools import partial
from math import inf
from pathlib import Path
from threading import TIMEOUT_MAX

import torch

from labkit.runtime.process_context import here
from labkit.runtime.transports.shm import ring
from labkit.runtime.transports.shm.futex import in_order
from labkit.runtime.transports.shm.ring import READ, WRITTEN, Ring, padded, taken_word
from labkit.runtime.transports.shm.slots import copy
from labkit.runtime.transports.wire import LaneWork


class Outbox(Ring):
    """The sender's end."""

    def __init__(self, path: Path, timeout_s: float):
        super().__init__(path, ring.SENDER, timeout_s)
        self._messages = self._written = self._queued = 0

    def send(self, x: torch.Tensor, tag: int) -> "Sent":
        with self._lock:
            self._messages += 1
            number = self._messages
            if not self._queued and self._fits(x.nbytes, number):
                self._write(x, tag, number)
                return Sent(self, number, x.nbytes)
            self._queued += 1
            writing = self._later(partial(self._write_queued, x, tag, number))
            return Sent(self, number, x.nbytes, writing)

    def _fits(self, nbytes: int, number: int) -> bool:
        room_bytes = ring.RING_BYTES - (self._written - self.words[READ])
        free = self.words[taken_word(number)] >= number - ring.MOST_UNTAKEN
        return free and room_bytes >= ring.HEAD.size + nbytes

    def _write(self, x: torch.Tensor, tag: int, number: int) -> None:
        """Append the message, as far and as soon as there is room for it."""
        self.wait(taken_word(number), number - ring.MOST_UNTAKEN, inf)
        self.wait(READ, self._written + ring.HEAD.size - ring.RING_BYTES, inf)
        ring.HEAD.pack_into(self._region.memory, self._head(self._written), tag, x.nbytes)
        self._written += ring.HEAD.size
        source, left_bytes = x.data_ptr(), x.nbytes
        while True:
            wanted_bytes = min(left_bytes, ring.GRAIN_BYTES)
            self.wait(READ, self._written + wanted_bytes - ring.RING_BYTES, inf)
            some_bytes = min(left_bytes, ring.RING_BYTES - (self._written - self.words[READ]))
            for address, begin, nbytes in self._spans(self._written, some_bytes):
                copy(address, source + begin, nbytes)
            source, left_bytes = source + some_bytes, left_bytes - some_bytes
            self._written += some_bytes if left_bytes else padded(some_bytes)
            self.words.announce(WRITTEN, self._written)
            if not left_bytes:
                return

    def _write_queued(self, x: torch.Tensor, tag: int, number: int) -> None:
        self._write(x, tag, number)
        with self._lock:
            self._queued -= 1


class Sent:
    """A message on its way out: over when it is taken."""

    def __init__(self, outbox: Outbox, number: int, nbytes: int, writing: LaneWork | None = None):
        self._outbox, self._number = outbox, number
        self._nbytes, self._writing = nbytes, writing

    def wait(self) -> int:
        """Returns the bytes copied."""
        until_s = time.monotonic() + self._outbox.timeout_s
        if self._writing is not None:
            self._writing.wait_for(min(self._outbox.timeout_s, TIMEOUT_MAX))
        self._outbox.wait(taken_word(self._number), self._number, until_s)
        return self._nbytes

    def is_completed(self) -> bool:
        return self._outbox.words[taken_word(self._number)] >= self._number


class Inbox(Ring):
    """The receiver's end."""

    def __init__(self, path: Path, timeout_s: float):
        super().__init__(path, ring.RECEIVER, timeout_s)
        self._messages = self._read = 0
        self._arriving: Arriving | None = None
        self._wanted: defaultdict[int, deque[Received]] = defaultdict(deque)  # by tag
        self._kept: defaultdict[int, deque[Arriving]] = defaultdict(deque)

    def receive(self, x: torch.Tensor, tag: int, asynchronous: bool) -> "Received":
        received = Received(self, x)
        with self._lock:
            if self._kept[tag]:
                message = self._kept[tag].popleft()
                message.receive = received
                self._hand_over(message)
            else:
                self._wanted[tag].append(received)
            self._take_out()
        if asynchronous and not received.done:
            self._later(partial(self.until_done, received, inf))
        return received

    def until_done(self, received: "Received", until_s: float) -> None:
        """Take out what arrives, for whomever it is, until `received` has its message. (Several
        threads may do so at once.)"""
        while (read := self._read_without(received)) is not None:
            self.wait(WRITTEN, read + 1, until_s)

    def is_done(self, received: "Received") -> bool:
        """Whether it has its message, once all that is here is taken out."""
        return self._read_without(received) is None

    def _read_without(self, received: "Received") -> int | None:
        """Take out all that is here. The bytes read so far if `received` still has no message: it
        comes behind them. (Read under the lock: later another thread may have taken it out.)"""
        with self._lock:
            if not received.done:
                self._take_out()
            return None if received.done else self._read

    def _take_out(self) -> None:
        if self.words.gave_up(ring.RECEIVER):  # no tensor is written after an error
            return
        while (written := self.words[WRITTEN]) > self._read:
            in_order()
            if self._arriving is None:
                tag, nbytes = ring.HEAD.unpack_from(self._region.memory, self._head(self._read))
                self._read += ring.HEAD.size
                self._arriving = self._expect(tag, nbytes)
            message = self._arriving
            some_bytes = min(written - self._read, message.left_bytes)
            for address, begin, nbytes in self._spans(self._read, some_bytes):
                copy(message.address + begin, address, nbytes)
            message.address += some_bytes
            message.left_bytes -= some_bytes
            if message.left_bytes:
                self._read += some_bytes
            else:
                self._read += padded(some_bytes) if some_bytes else 0
                self._arriving = None
                self._hand_over(message)
            self.words.announce(READ, self._read)

    def _expect(self, tag: int, nbytes: int) -> "Arriving":
        """The message that begins, on its way to its receive, or into memory of its own."""
        self._messages += 1
        received = self._wanted[tag].popleft() if self._wanted[tag] else None
        if received is not None and received.x.nbytes == nbytes:
            return Arriving(self._messages, nbytes, received.x, received)
        with here.carrying():
            room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        message = Arriving(self._messages, nbytes, room, received)
        if received is None:
            self._kept[tag].append(message)
        return message

    def _hand_over(self, message: "Arriving") -> None:
        """If it is complete and wanted, it is taken now."""
        received = message.receive
        if received is None or message.left_bytes:
            return
        if received.x.nbytes != message.x.nbytes:
            received.problem = (
                f"a message of {message.x.nbytes} bytes came for a tensor of {received.x.nbytes}"
            )
        elif message.x is not received.x:
            copy(received.x.data_ptr(), message.x.data_ptr(), message.x.nbytes)
        received.done = True
        self.words.announce(taken_word(message.number), message.number)


class Arriving:
    """A message that comes out of the ring into `x`, for `receive` if there is one yet."""

    def __init__(
        self, number: int, nbytes: int, x: torch.Tensor, receive: "Received | None" = None
    ):
        self.number, self.left_bytes, self.x, self.receive = number, nbytes, x, receive
        self.address = x.data_ptr()


class Received:
    """A receive: done when its message is in `x`."""

    def __init__(self, inbox: Inbox, x: torch.Tensor):
        self._inbox, self.x = inbox, x
        self.done, self.problem = False, ""

    def wait(self) -> int:
        """Returns the bytes copied."""
        if not self.done:
            self._inbox.until_done(self, time.monotonic() + self._inbox.timeout_s)
        if self.problem:
            raise RuntimeError(self.problem)
        return self.x.nbytes

    def is_completed(self) -> bool:
        return self._inbox.is_done(self)
