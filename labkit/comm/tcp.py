"""Send and receive over sockets of our own: what gloo does underneath, to be read, and faster.

    rank 0   isend ─▶ Writer ══════ TCP ══════▶ Reader ─▶ the tensor of the irecv with this tag
                                                     └──▶ kept, until an irecv asks for it

    a message    │ group, 8 bytes │ tag, 8 │ length, 8 │ the bytes of the tensor

There is one connection for each pair of ranks and direction, whatever groups the two share, made
with the first message; where every rank listens stands in the store at which the ranks met. What a
socket takes at once, the sender's own thread gives it; a thread of the writer gives it the rest.
The reader, a thread, takes out what comes, so that messages travel while both ends compute. It asks
for a whole tensor in one system call, where gloo's loop wakes up for every part of one.

A send is over when its bytes have left, so two ranks that both send first do not wait for each
other (over gloo and shared memory they do). After an error a connection is of no more use.
"""

import json
import os
import secrets
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch

from labkit.comm.surroundings import here
from labkit.comm.wire import Lane, LaneWork, Wire, Work, as_bytes

HEAD = struct.Struct("<Qqq")  # group, tag, length
TOKEN_BYTES = 16  # what a caller must show, so that nobody else is listened to
HELLO = struct.Struct(f"<{TOKEN_BYTES}sq")  # and its rank
LOOPBACK = "127.0.0.1"
OVER = "; the connection is of no more use, start the ranks anew (World.restart())"


class Key(NamedTuple):
    """Messages of one group and tag arrive in the order in which they were sent."""

    group: int
    tag: int


class TcpWire(Wire):
    """Messages between the ranks of `group` through this process's `post`. `number` is the
    group's own, the same on all its ranks."""

    def __init__(self, group: Any, post: "Post", number: int):
        super().__init__(group)
        self._post, self._number = post, number
        self._ranks = torch.distributed.get_process_group_ranks(group)

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._post.writer(self._ranks[peer]).send(Key(self._number, tag), as_bytes(x))

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._post.reader(self._ranks[peer]).receive(Key(self._number, tag), as_bytes(x))


class Post:
    """All connections of this process. Rank `rank` listens at `host` and says so in `store`,
    torch's, at which all ranks of the world are; it is made before any rank sends."""

    def __init__(self, store: Any, rank: int, host: str, timeout_s: float):
        self._store, self._rank = store, rank
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._writers: dict[int, Writer] = {}
        self._readers: dict[int, Reader] = {}
        self._lock = threading.Lock()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        place = [host, self._listener.getsockname()[1], self._token.hex()]
        store.set(_key_of(rank), json.dumps(place))
        threading.Thread(target=self._accept, name="labkit post", daemon=True).start()

    def writer(self, rank: int) -> "Writer":
        with self._lock:
            if rank not in self._writers:
                self._writers[rank] = Writer(rank, partial(self._call, rank), self._timeout_s)
            return self._writers[rank]

    def reader(self, rank: int) -> "Reader":
        with self._lock:
            if rank not in self._readers:
                self._readers[rank] = Reader(rank, self._timeout_s)
            return self._readers[rank]

    def _call(self, rank: int) -> socket.socket:
        """A connection to this rank, to write to."""
        key = _key_of(rank)
        self._store.wait([key], timedelta(seconds=min(self._timeout_s, 3e9)))
        host, port, token = json.loads(self._store.get(key))
        connection = socket.create_connection((host, port), timeout=self._timeout_s)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(HELLO.pack(bytes.fromhex(token), self._rank))
        return connection

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(
                target=self._answer, args=(connection,), name="labkit reader", daemon=True
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            hello = bytearray(HELLO.size)
            try:
                _fill(memoryview(hello), connection)
            except OSError:
                return
            token, rank = HELLO.unpack(hello)
            if secrets.compare_digest(token, self._token):
                self.reader(rank).read(connection)


class Message:
    """One message at one of its ends, as work to wait for."""

    def __init__(self, x: torch.Tensor, timeout_s: float, give_up: Callable[[str], None]):
        self.x, self._timeout_s, self._give_up = x, timeout_s, give_up
        self._pending = threading.Lock()  # held until it is over
        self._pending.acquire()
        self._problem = ""

    def over(self, problem: str = "") -> None:
        self._problem = problem
        self._pending.release()

    def wait(self) -> None:
        """Raises RuntimeError where it failed, or is not over in time."""
        if not self._pending.acquire(timeout=self._timeout_s):
            self._give_up(f"Timed out waiting {self._timeout_s:g} s for the message")
            self._pending.acquire()
        self._pending.release()
        if self._problem:
            raise RuntimeError(self._problem)

    def is_completed(self) -> bool:
        return not self._pending.locked()


class Writer:
    """The end at which messages to rank `to` leave, in the order of `send`."""

    def __init__(self, to: int, call: Callable[[], socket.socket], timeout_s: float):
        self._to, self._call, self._timeout_s = to, call, timeout_s
        self._connection: socket.socket | None = None
        self._problem = ""
        self._lane: Lane | None = None
        self._queued = 0
        self._lock = threading.Lock()

    def send(self, key: Key, x: torch.Tensor) -> Message:
        message = Message(x, self._timeout_s, self._fail)
        data, head = memoryview(x.numpy()), HEAD.pack(*key, x.numel())
        with self._lock:
            if self._problem:
                raise RuntimeError(self._problem + OVER)
            try:
                connection = self._connection = self._connection or self._call()
                sent = 0 if self._queued else _at_once(connection, head, data)
            except OSError as error:
                raise RuntimeError(self._failed(error)) from error
            if sent == len(head) + len(data):
                message.over()
                return message
            self._queued += 1
            self._lane = self._lane or Lane("labkit writer")
            rest = [memoryview(head)[sent:], data[max(sent - len(head), 0) :]]
            self._lane.put(LaneWork(partial(self._finish, message, connection, rest)))
        return message

    def _finish(
        self, message: Message, connection: socket.socket, rest: list[memoryview]
    ) -> None:
        """On the lane: what the socket did not take at once."""
        problem = self._problem
        try:
            for part in () if problem else rest:
                connection.sendall(part)
        except OSError as error:
            problem = self._problem or self._failed(error)
        with self._lock:
            self._queued -= 1
        message.over(problem)

    def _failed(self, error: OSError) -> str:
        self._problem = f"no message reaches rank {self._to} any more: {error}"
        return self._problem

    def _fail(self, problem: str) -> None:
        """Let go of what is on its way: the other end hears of it, too."""
        self._problem = f"{problem} to rank {self._to} to leave"
        if self._connection is not None:
            _end(self._connection)


class Arriving:
    """A message that comes out of the socket, into the tensor of `message` or one of its own."""

    def __init__(self, room: torch.Tensor, message: Message | None):
        self.room, self.message, self.complete = room, message, False


class Reader:
    """The end at which messages of rank `source` arrive."""

    def __init__(self, source: int, timeout_s: float):
        self._source, self._timeout_s = source, timeout_s
        self._connection: socket.socket | None = None
        self._problem = ""
        self._wanted: defaultdict[Key, deque[Message]] = defaultdict(deque)
        self._kept: defaultdict[Key, deque[Arriving]] = defaultdict(deque)
        self._lock = threading.Lock()

    def receive(self, key: Key, x: torch.Tensor) -> Message:
        message = Message(x, self._timeout_s, self._fail)
        with self._lock:
            if self._kept[key]:
                arriving = self._kept[key].popleft()
                arriving.message = message
                _hand_over(arriving)
            elif self._problem:
                raise RuntimeError(self._problem + OVER)
            else:
                self._wanted[key].append(message)
        return message

    def read(self, connection: socket.socket) -> None:
        """Take out what comes, until there comes no more."""
        self._connection = connection
        if self._problem:  # nobody waits any more
            return
        head = bytearray(HEAD.size)
        try:
            while True:
                _fill(memoryview(head), connection)
                group, tag, nbytes = HEAD.unpack(head)
                arriving = self._expect(Key(group, tag), nbytes)
                _fill(memoryview(arriving.room.numpy()), connection)
                with self._lock:
                    arriving.complete = True
                    _hand_over(arriving)
        except OSError as error:
            self._lose(self._problem or f"no message comes from rank {self._source}: {error}")

    def _expect(self, key: Key, nbytes: int) -> Arriving:
        with self._lock:
            message = self._wanted[key].popleft() if self._wanted[key] else None
            if message is not None and message.x.numel() == nbytes:
                self._arriving = Arriving(message.x, message)
                return self._arriving
            with here.carrying():
                room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._arriving = Arriving(room, message)
            if message is None:
                self._kept[key].append(self._arriving)
            return self._arriving

    _arriving: Arriving | None = None  # the one that is on its way out

    def _fail(self, problem: str) -> None:
        """Nobody's tensor is written after its error."""
        problem = f"{problem} from rank {self._source}"
        if self._connection is None:
            self._lose(problem)
        else:
            self._problem = problem
            _end(self._connection)  # so that `read` ends, and loses the rest

    def _lose(self, problem: str) -> None:
        with self._lock:
            self._problem = problem
            lost = [message for queue in self._wanted.values() for message in queue]
            self._wanted.clear()
            if (last := self._arriving) is not None and not last.complete:
                if last.message is not None:
                    lost.append(last.message)
                for queue in self._kept.values():
                    if last in queue:
                        queue.remove(last)
            for message in lost:
                message.over(problem)


def _hand_over(arriving: Arriving) -> None:
    """A message that is complete, to whom wants it."""
    message, room = arriving.message, arriving.room
    if message is None or not arriving.complete:
        return
    if message.x.numel() != room.numel():
        message.over(
            f"a message of {room.numel()} bytes came for a tensor of {message.x.numel()}"
        )
        return
    if message.x is not room:
        message.x.copy_(room)
    message.over()


def _at_once(connection: socket.socket, head: bytes, data: memoryview) -> int:
    """How many of these bytes the socket takes without waiting."""
    try:
        return connection.sendmsg([head, data], [], socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0


def _fill(room: memoryview, connection: socket.socket) -> None:
    """Raises OSError where the other end has closed."""
    while room:
        nbytes = connection.recv_into(room, 0, socket.MSG_WAITALL)
        if not nbytes:
            raise ConnectionResetError("it has closed its connection, or has ended")
        room = room[nbytes:]


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is over


def own_host() -> str:
    """The address under which the other ranks reach this machine: the one that it has towards the
    rank they all met at; this machine's own where they meet in a file."""
    meeting = os.environ.get("MASTER_ADDR")
    if not meeting:
        return LOOPBACK
    family, kind, _, _, place = socket.getaddrinfo(meeting, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


def _key_of(rank: int) -> str:
    return f"labkit/tcp/{rank}"
