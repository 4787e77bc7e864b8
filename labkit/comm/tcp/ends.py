"""The two ends of a connection: a writer on the sender's side, a reader on the receiver's.

Writer   what the socket takes at once, the caller of `send` gives it; a lane gives it the rest
Reader   takes out what comes: into the tensor of who wants it, or into one of its own
"""

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

from labkit.comm.surroundings import here
from labkit.comm.wire import Lane, LaneWork

Item = TypeVar("Item")
HEAD = struct.Struct("<Qqq")  # group, tag, length
OVER = "; the connections are of no more use, start the ranks anew (in a World: World.restart())"
GiveUp = Callable[[str], None]


class Key(NamedTuple):
    """Messages of one group and tag arrive in the order in which they were sent."""

    group: int
    tag: int


class Message:
    """One message at one of its ends, as work to wait for."""

    def __init__(self, x: torch.Tensor, timeout_s: float, give_up: GiveUp):
        self.x, self._timeout_s, self._give_up = x, timeout_s, give_up
        self._pending = threading.Lock()  # held until it is over
        self._pending.acquire()
        self._over, self._problem = False, ""

    def over(self, problem: str = "") -> None:
        self._over, self._problem = True, problem
        self._pending.release()

    def wait(self) -> None:
        """Raises RuntimeError where it failed, or is not over in time: then it, and all else that
        is under way in this process, is given up."""
        if not self._over:
            if not self._pending.acquire(timeout=self._timeout_s):
                self._give_up(f"Timed out waiting {self._timeout_s:g} s for the message")
                self._pending.acquire()
            self._pending.release()
        if self._problem:
            raise RuntimeError(self._problem)

    def is_completed(self) -> bool:
        return self._over


class Writer:
    """The end at which messages to rank `to` leave, in the order of `send`. `broken` is told when
    no more can."""

    def __init__(
        self, to: int, call: Callable[[], socket.socket], timeout_s: float, broken: GiveUp
    ):
        self._to, self._call, self._timeout_s, self._broken = to, call, timeout_s, broken
        self._connection: socket.socket | None = None
        self._problem = ""
        self._lane: Lane | None = None
        self._queued = 0
        self._lock = threading.Lock()

    def send(self, key: Key, x: torch.Tensor) -> Message:
        """Raises RuntimeError where no message leaves any more."""
        message = Message(x, self._timeout_s, self._too_late)
        data, head = x.numpy().data, HEAD.pack(*key, x.numel())
        with self._lock:
            if self._problem:
                raise RuntimeError(self._problem + OVER)
            try:
                connection = self._connection = self._connection or self._call()
                sent = 0 if self._queued else _at_once(connection, head, data)
                if sent == len(head) + len(data):
                    message.over()
                    return message
                self._lane = self._lane or Lane("labkit writer")
                rest = [memoryview(head)[sent:], data[max(sent - len(head), 0) :]]
                self._lane.put(LaneWork(partial(self._finish, message, connection, rest)))
                self._queued += 1
            except BaseException as error:  # an interrupt, too: a part may have left
                problem = self._problem = self._in_words(error)
                self._broken(problem)
                if isinstance(error, OSError):
                    raise RuntimeError(problem + OVER) from error
                raise
        return message

    def _finish(self, message: Message, connection: socket.socket, rest: list[memoryview]) -> None:
        """On the lane: what the socket did not take at once."""
        problem = self._problem
        try:
            for part in () if problem else rest:
                connection.sendall(part)
        except OSError as error:
            problem = self._problem or self._in_words(error)
            self._broken(problem)
        with self._lock:
            self._queued -= 1
        message.over(problem)

    def _in_words(self, error: BaseException) -> str:
        why = str(error) or type(error).__name__
        return f"no message reaches rank {self._to} any more: {why}"

    def _too_late(self, problem: str) -> None:
        self._broken(f"{problem} to rank {self._to} to leave")

    def fail(self, problem: str) -> None:
        """Let go of what is on its way: the other end hears of it, too. (Without the lock: who
        holds it may be waiting for the other end.)"""
        self._problem = self._problem or problem
        if self._connection is not None:
            end(self._connection)


class Queues(Generic[Item]):
    """First in, first out, for each key; of a key without items nothing is kept."""

    def __init__(self) -> None:
        self._queues: dict[Key, deque[Item]] = {}

    def add(self, key: Key, item: Item) -> None:
        self._queues.setdefault(key, deque()).append(item)

    def first(self, key: Key) -> Item | None:
        """Taken out; None where there is none."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        item = queue.popleft()
        if not queue:
            del self._queues[key]
        return item

    def remove(self, item: Item) -> None:
        self._queues = {
            key: deque(rest)
            for key, queue in self._queues.items()
            if (rest := [one for one in queue if one is not item])
        }

    def empty(self) -> list[Item]:
        """All items, taken out."""
        items = [item for queue in self._queues.values() for item in queue]
        self._queues.clear()
        return items


class Arriving:
    """A message that comes out of the socket, into the tensor of `message` or one of its own."""

    def __init__(self, message: Message | None):
        self.message, self.complete = message, False
        self.room: torch.Tensor | None = None


class Reader:
    """The end at which messages of rank `source` arrive. `broken` is told when one that is wanted
    does not."""

    def __init__(self, source: int, timeout_s: float, broken: GiveUp):
        self._source, self._timeout_s, self._broken = source, timeout_s, broken
        self._connection: socket.socket | None = None
        self._problem = ""
        self._wanted: Queues[Message] = Queues()
        self._kept: Queues[Arriving] = Queues()
        self._arriving: Arriving | None = None  # the one that is coming out
        self._lock = threading.Lock()

    def receive(self, key: Key, x: torch.Tensor) -> Message:
        """Raises RuntimeError where no message arrives any more."""
        message = Message(x, self._timeout_s, self._too_late)
        with self._lock:
            if (arriving := self._kept.first(key)) is not None:
                arriving.message = message
                _hand_over(arriving)
            elif self._problem:
                raise RuntimeError(self._problem + OVER)
            else:
                self._wanted.add(key, message)
        return message

    def read(self, connection: socket.socket) -> None:
        """Take out what comes, until there comes no more."""
        with self._lock:
            if self._problem:  # nobody waits any more
                return
            self._connection = connection
        head = bytearray(HEAD.size)
        try:
            while True:
                fill(memoryview(head), connection)
                group, tag, nbytes = HEAD.unpack(head)
                self._expect(Key(group, tag), nbytes)
                self._take_out(connection)
        except Exception as error:  # whatever it is: somebody may be waiting
            self._lose(f"no message comes from rank {self._source} any more: {error}")

    def _expect(self, key: Key, nbytes: int) -> None:
        with self._lock:
            message = self._wanted.first(key)
            arriving = self._arriving = Arriving(message)
            if message is None:
                self._kept.add(key, arriving)
            if message is not None and message.x.numel() == nbytes:
                arriving.room = message.x
            else:
                with here.carrying():
                    arriving.room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _take_out(self, connection: socket.socket) -> None:
        """(A method of its own, so that no variable holds a tensor while the next is awaited.)"""
        assert self._arriving is not None and self._arriving.room is not None
        fill(self._arriving.room.numpy().data, connection)
        with self._lock:
            self._arriving.complete = True
            _hand_over(self._arriving)
            self._arriving = None

    def _too_late(self, problem: str) -> None:
        self._broken(f"{problem} from rank {self._source}")

    def fail(self, problem: str) -> None:
        """Nobody's tensor is written after this."""
        with self._lock:
            self._problem = self._problem or problem
            reading = self._connection is not None
        if self._connection is not None:
            end(self._connection)  # so that `read` ends, and loses the rest
        if not reading:
            self._lose(problem)

    def _lose(self, problem: str) -> None:
        """What was to come does not come."""
        with self._lock:
            problem = self._problem = self._problem or problem
            lost = self._wanted.empty()
            if (half := self._arriving) is not None:
                if half.message is None:
                    self._kept.remove(half)
                else:
                    lost.append(half.message)
                self._arriving = None
        if lost:
            self._broken(problem)
        for message in lost:
            message.over(problem)


def _hand_over(arriving: Arriving) -> None:
    """A message that is complete, to whom wants it."""
    message, room = arriving.message, arriving.room
    if message is None or room is None or not arriving.complete:
        return
    if message.x.numel() != room.numel():
        message.over(f"a message of {room.numel()} bytes came for a tensor of {message.x.numel()}")
        return
    if message.x is not room:  # (numpy's: torch would ask whether the tensor is an inference one)
        message.x.numpy()[:] = room.numpy()
    message.over()


def _at_once(connection: socket.socket, head: bytes, data: memoryview) -> int:
    """How many of these bytes the socket takes without waiting."""
    try:
        return connection.sendmsg([head, data], [], socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0


def fill(room: memoryview, connection: socket.socket) -> None:
    """Raises OSError where the other end has closed."""
    while room:
        nbytes = connection.recv_into(room, 0, socket.MSG_WAITALL)
        if not nbytes:
            raise ConnectionResetError("it has closed its connection, or has ended")
        room = room[nbytes:]


def end(connection: socket.socket) -> None:
    with connection, suppress(OSError):  # it is over
        connection.shutdown(socket.SHUT_RDWR)
