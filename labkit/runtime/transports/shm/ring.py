"""Messages through shared memory: a ring of bytes per pair of sender and receiver.

    words:  written (by the sender) | read (by the receiver) | taken 0, 1, ... (by the receiver)
    ring:   ... | tag, length | data ...... | tag, length | data ... |
                 ^ read                              written ^

The sender (outbox) appends while there is room, the receiver (inbox) empties the ring; both count
bytes from the start. A message longer than the ring passes through in parts. The caller copies the
bytes that fit or that it waits for; a thread of the ring copies the rest while both ends compute.

A receiver may request tag 1 before tag 0: messages without a matching receive are kept in private
memory. A message is *taken* once a receive has its last byte; its number is then stored in `taken`,
and only then does the send complete, as on a link without a buffer. (Two ranks that both send
first therefore deadlock, however short the messages.) Copies: S on the sender, S on the receiver,
and S more on the receiver for a message that was kept.
"""

import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path

import torch

from labkit.runtime.process_context import here
from labkit.runtime.transports.shm.region import Region, in_order
from labkit.runtime.transports.shm.slots import copy
from labkit.runtime.transports.wire import Lane, LaneWork

RING_BYTES = 1 << 20  # a multiple of HEAD.size
HEAD = struct.Struct("<QQ")  # the tag, and the number of bytes that follow
MAX_UNTAKEN = 2048  # messages per direction; the next message waits until the first is taken
GRAIN_BYTES = 1 << 18  # of a long message, to copy before waking the other end
WRITTEN, READ, TAKEN = 0, 1, 2
SENDER, RECEIVER = 0, 1


class Ring:
    """One direction between two ranks, seen from one end."""

    end: int

    def __init__(self, path: Path, timeout_s: float):
        self.region = Region(path, self.end, 2, TAKEN + MAX_UNTAKEN, RING_BYTES)
        self.timeout_s = timeout_s
        self._lock = threading.Lock()  # threads of this process take turns
        self._lane: Lane | None = None

    def wait(self, word: int, value: int, deadline_s: float) -> None:
        if not self.region.wait(word, value, deadline_s, (SENDER, RECEIVER)):
            if self.gave_up():
                raise RuntimeError("this rank or the other rank gave up after an error")
            raise RuntimeError(f"Timed out waiting {self.timeout_s:g} s for the other rank")

    def gave_up(self) -> bool:
        return self.region.gave_up(SENDER) or self.region.gave_up(RECEIVER)

    def give_up(self) -> None:
        """Stop moving data and make the other end stop waiting."""
        with self._lock:
            self.region.give_up()

    def _later(self, function: Callable[[], None]) -> LaneWork:
        if self._lane is None:
            self._lane = Lane("labkit message")
        return self._lane.put(LaneWork(function))

    def _head(self, position: int) -> int:
        """Offset in memory of the head at `position`; a head never wraps around the end."""
        return self.region.data + position % RING_BYTES

    def _spans(self, position: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Contiguous spans from `position` on: (address in the ring, offset in the data, bytes)."""
        done = 0
        while done < nbytes:
            at = (position + done) % RING_BYTES
            some = min(nbytes - done, RING_BYTES - at)
            yield self.region.address(at), done, some
            done += some


class Outbox(Ring):
    """The sender's end of a ring."""

    end = SENDER

    def __init__(self, path: Path, timeout_s: float):
        super().__init__(path, timeout_s)
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
        room_bytes = RING_BYTES - (self._written - self.region[READ])
        free = self.region[taken_word(number)] >= number - MAX_UNTAKEN
        return free and room_bytes >= HEAD.size + nbytes

    def _write(self, x: torch.Tensor, tag: int, number: int) -> None:
        """Append the message as room becomes available."""
        self.wait(taken_word(number), number - MAX_UNTAKEN, inf)
        self.wait(READ, self._written + HEAD.size - RING_BYTES, inf)
        HEAD.pack_into(self.region.memory, self._head(self._written), tag, x.nbytes)
        self._written += HEAD.size
        source, left_bytes = x.data_ptr(), x.nbytes
        while True:
            wanted_bytes = min(left_bytes, GRAIN_BYTES)
            self.wait(READ, self._written + wanted_bytes - RING_BYTES, inf)
            some_bytes = min(left_bytes, RING_BYTES - (self._written - self.region[READ]))
            for address, begin, nbytes in self._spans(self._written, some_bytes):
                copy(address, source + begin, nbytes)
            source, left_bytes = source + some_bytes, left_bytes - some_bytes
            self._written += some_bytes if left_bytes else padded(some_bytes)
            self.region.announce(WRITTEN, self._written)
            if not left_bytes:
                return

    def _write_queued(self, x: torch.Tensor, tag: int, number: int) -> None:
        self._write(x, tag, number)
        with self._lock:
            self._queued -= 1


class Sent:
    """A message in flight; the send completes when the receiver takes the message."""

    def __init__(self, outbox: Outbox, number: int, nbytes: int, writing: LaneWork | None = None):
        self._outbox, self._number = outbox, number
        self._nbytes, self._writing = nbytes, writing

    def wait(self) -> int:
        """Wait until the operation is complete; return the bytes copied."""
        deadline_s = time.monotonic() + self._outbox.timeout_s
        if self._writing is not None:
            self._writing.wait_for(min(self._outbox.timeout_s, threading.TIMEOUT_MAX))
        self._outbox.wait(taken_word(self._number), self._number, deadline_s)
        return self._nbytes

    def is_completed(self) -> bool:
        return self._outbox.region[taken_word(self._number)] >= self._number


class Inbox(Ring):
    """The receiver's end of a ring: sorts messages by tag and keeps them until requested."""

    end = RECEIVER

    def __init__(self, path: Path, timeout_s: float):
        super().__init__(path, timeout_s)
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

    def until_done(self, received: "Received", deadline_s: float) -> None:
        """Read messages for any receive until `received` is done; several threads may call this."""
        while (read := self.read_without(received)) is not None:
            self.wait(WRITTEN, read + 1, deadline_s)

    def read_without(self, received: "Received") -> int | None:
        """Empty the ring. Returns None if `received` is done, else the number of bytes read so far.
        Holds the lock meanwhile, because other threads also empty the ring."""
        with self._lock:
            if not received.done:
                self._take_out()
            return None if received.done else self._read

    def _take_out(self) -> None:
        if self.region.gave_up(RECEIVER):  # no tensor is written after an error
            return
        while (written := self.region[WRITTEN]) > self._read:
            in_order()
            if self._arriving is None:
                tag, nbytes = HEAD.unpack_from(self.region.memory, self._head(self._read))
                self._read += HEAD.size
                self._arriving = self._expect(tag, nbytes)
            message = self._arriving
            target = message.x.data_ptr() + message.x.nbytes - message.left_bytes
            some_bytes = min(written - self._read, message.left_bytes)
            for address, begin, nbytes in self._spans(self._read, some_bytes):
                copy(target + begin, address, nbytes)
            message.left_bytes -= some_bytes
            if message.left_bytes:
                self._read += some_bytes
            else:
                self._read += padded(some_bytes)
                self._arriving = None
                self._hand_over(message)
            self.region.announce(READ, self._read)

    def _expect(self, tag: int, nbytes: int) -> "Arriving":
        """The next message, to be read into the posted receive's tensor or into private memory."""
        self._messages += 1
        received = self._wanted[tag].popleft() if self._wanted[tag] else None
        if received is not None and received.x.nbytes == nbytes:
            return Arriving(self._messages, received.x, received)
        with here.carrying():
            room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        message = Arriving(self._messages, room, received)
        if received is None:
            self._kept[tag].append(message)
        return message

    def _hand_over(self, message: "Arriving") -> None:
        """Complete the matching receive, if posted, once all bytes of the message have arrived."""
        received = message.receive
        if received is None or message.left_bytes:
            return
        if received.x.nbytes != message.x.nbytes:
            received.problem = (
                f"a message of {message.x.nbytes} bytes arrived for a tensor of {received.x.nbytes}"
            )
        elif message.x is not received.x:
            copy(received.x.data_ptr(), message.x.data_ptr(), message.x.nbytes)
        received.done = True
        self.region.announce(taken_word(message.number), message.number)


class Arriving:
    """A message being read from the ring into `x`, for `receive` if already posted."""

    def __init__(self, number: int, x: torch.Tensor, receive: "Received | None"):
        self.number, self.x, self.receive, self.left_bytes = number, x, receive, x.nbytes


class Received:
    """A receive, done once its message is in `x`."""

    def __init__(self, inbox: Inbox, x: torch.Tensor):
        self._inbox, self.x = inbox, x
        self.done, self.problem = False, ""

    def wait(self) -> int:
        """Wait until the operation is complete; return the bytes copied."""
        if not self.done:
            self._inbox.until_done(self, time.monotonic() + self._inbox.timeout_s)
        if self.problem:
            raise RuntimeError(self.problem)
        return self.x.nbytes

    def is_completed(self) -> bool:
        return self._inbox.read_without(self) is None


def taken_word(number: int) -> int:
    """The word in which the receiver announces that message `number` is taken."""
    return TAKEN + number % MAX_UNTAKEN


def padded(nbytes: int) -> int:
    """`nbytes` rounded up so that the next head is aligned."""
    return -(-nbytes // HEAD.size) * HEAD.size
