"""All connections of a process, and the wire of a group over them."""

import json
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any

import torch
import torch.distributed as dist

from labkit.comm.tcp.ends import OVER, Key, Reader, Writer, end, fill
from labkit.comm.wire import Wire, Work, as_bytes

TOKEN_BYTES = 16  # what a caller must show, so that nobody else is listened to
HELLO_S = 10.0  # within which it does
HELLO = struct.Struct(f"<{TOKEN_BYTES}sq")  # and its rank
SOCKET_BYTES = 1 << 18  # that the kernel keeps at either end of a connection inside a machine
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
    """All connections of this process, which listens at `host` and says so in `store`, torch's, in
    which all ranks of the world do. It is made on all of them at once, and each time anew.

    Where a message does not leave or come in time, all connections end: what else is under way
    belongs to the same operation, or to one that comes after it, and the others hear of it at once.

    Raises RuntimeError where a rank does not come, or comes without one.
    """

    def __init__(self, store: Any, rank: int, size: int, host: str, timeout_s: float):
        self._rank, self._timeout_s = rank, min(timeout_s, threading.TIMEOUT_MAX)
        self._writers: dict[int, Writer] = {}
        self._readers: dict[int, Reader] = {}
        self._problem = ""
        self._lock = threading.Lock()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        _keep_little(self._listener, host)
        threading.Thread(target=self._accept, name="labkit post", daemon=True).start()
        place = host, self._listener.getsockname()[1], self._token.hex()
        try:
            self._places = _told_by_all(store, rank, size, json.dumps(place), self._timeout_s)
        except BaseException:
            self.close()
            raise

    def writer(self, rank: int) -> Writer:
        with self._lock:
            if rank not in self._writers:
                self._refuse_if_broken()
                call = partial(self._call, rank)
                self._writers[rank] = Writer(rank, call, self._timeout_s, self.fail)
            return self._writers[rank]

    def reader(self, rank: int) -> Reader:
        with self._lock:
            if rank not in self._readers:
                self._refuse_if_broken()
                self._readers[rank] = Reader(rank, self._timeout_s, self.fail)
            return self._readers[rank]

    def _refuse_if_broken(self) -> None:
        if self._problem:
            raise RuntimeError(self._problem + OVER)

    def fail(self, problem: str) -> None:
        """Give up all that is under way."""
        with self._lock:
            if self._problem:
                return
            self._problem = problem
            ends: list[Writer | Reader] = [*self._writers.values(), *self._readers.values()]
        for one in ends:
            one.fail(problem)

    def close(self) -> None:
        """The process leaves its world."""
        end(self._listener)
        self.fail("this process has left its world")

    def _call(self, rank: int) -> socket.socket:
        """A connection to this rank, to write to."""
        host, port, token = self._places[rank]
        try:
            connection = socket.create_connection((host, port), timeout=self._timeout_s)
        except OSError as error:
            raise ConnectionError(f"{error} ({host}, port {port})") from error
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_little(connection, host)
        connection.sendall(HELLO.pack(bytes.fromhex(token), self._rank))
        return connection

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed, or the system has none left for now
                time.sleep(0.1)
                continue
            answer = threading.Thread(
                target=self._answer, args=(connection,), name="labkit reader", daemon=True
            )
            try:
                answer.start()
            except RuntimeError:  # no thread can be had: the other end hears of it
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, RuntimeError):
            hello = bytearray(HELLO.size)
            connection.settimeout(HELLO_S)
            fill(memoryview(hello), connection)
            connection.settimeout(None)
            token, rank = HELLO.unpack(hello)
            if secrets.compare_digest(token, self._token):
                self.reader(rank).read(connection)


def _told_by_all(
    store: Any, rank: int, size: int, place: str, timeout_s: float
) -> list[tuple[str, int, str]]:
    """Where each rank listens."""
    number = store.add(f"labkit/tcp/posts of {rank}", 1)  # this is the first, or a later one
    keys = [f"labkit/tcp/{number}/{one}" for one in range(size)]
    store.set(keys[rank], place)
    places = []
    for one, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=min(timeout_s, 3e9)))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {one} did not say where it listens within {timeout_s:g} s; has it "
                "LABKIT_TRANSPORT=tcp, as this one? Set it on every machine"
            ) from error
        places.append(tuple(json.loads(store.get(key))))
    return places


def _keep_little(one: socket.socket, host: str) -> None:
    """Inside a machine, where nothing is far away, caches hold what the kernel keeps."""
    if host in (LOOPBACK, "::1"):
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            one.setsockopt(socket.SOL_SOCKET, size, SOCKET_BYTES)


def own_host() -> str:
    """The address under which the other ranks reach this machine: the one that it has towards the
    rank they all met at; this machine's own where they meet in a file.

    Raises ValueError where that is no address for other machines, and OSError where there is none.
    """
    meeting = os.environ.get("MASTER_ADDR")
    if not meeting:
        return LOOPBACK
    problem = OSError(f"no way to MASTER_ADDR={meeting}")
    for family, kind, _, _, place in socket.getaddrinfo(meeting, 1, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                found = str(probe.getsockname()[0])
        except OSError as error:
            problem = error
            continue
        inside = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        if not inside and ip_address(found.partition("%")[0]).is_loopback:
            raise ValueError(
                f"MASTER_ADDR={meeting} is {found} on this machine, which others cannot reach; "
                "give the address that this machine has in the network of the others"
            )
        return found
    raise problem
