"""All connections of a process, and the wire of a group over them."""

import json
import os
import secrets
import socket
import struct
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.comm.tcp.ends import Key, Reader, Writer, fill
from labkit.comm.wire import Wire, Work, as_bytes

TOKEN_BYTES = 16  # what a caller must show, so that nobody else is listened to
HELLO = struct.Struct(f"<{TOKEN_BYTES}sq")  # and its rank
SOCKET_BYTES = 1 << 18  # that the kernel keeps at either end: few, so that caches hold them
LOOPBACK = "127.0.0.1"


class TcpWire(Wire):
    """Messages between the ranks of `group` through this process's `post`. `number` is the
    group's own, the same on all its ranks."""

    def __init__(self, group: Any, post: "Post", number: int):
        super().__init__(group)
        self._post, self._number = post, number
        self._ranks = dist.get_process_group_ranks(group)

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
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
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
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
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
                fill(memoryview(hello), connection)
            except OSError:
                return
            token, rank = HELLO.unpack(hello)
            if secrets.compare_digest(token, self._token):
                self.reader(rank).read(connection)


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
