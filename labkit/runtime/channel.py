"""Messages between the driver and its ranks, over a local socket.

A message is a pickle and its large buffers (mostly tensors), sent and received without copies:

    | number of parts | length per part | pickle | buffer | buffer ...
"""

import pickle
import socket
import struct
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

LENGTH = struct.Struct("<Q")
PIECE = 1 << 20
MAX_FOLDER_BYTES = 93 if hasattr(socket, "AF_UNIX") else 1 << 20  # macOS: 103 bytes per socket path


class Channel:
    """One end of a message stream. Its methods raise EOFError if the other end is closed."""

    def __init__(self, sock: socket.socket):
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Any) -> None:
        """Send any object that plain pickle accepts."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(data), *(buffer.raw() for buffer in buffers)]
        lengths = [len(parts), *(part.nbytes for part in parts)]
        try:
            self.sock.sendall(b"".join(LENGTH.pack(length) for length in lengths))
            for part in parts:
                self.sock.sendall(part)
        except OSError as error:
            raise EOFError(f"the other end is closed: {error}") from None

    def recv(self) -> Any:
        """Wait for the next message and return it."""
        (count,) = LENGTH.unpack(self._recv_exactly(LENGTH.size))
        lengths = [LENGTH.unpack(self._recv_exactly(LENGTH.size))[0] for _ in range(count)]
        data, *buffers = [self._recv_exactly(length) for length in lengths]
        return pickle.loads(data, buffers=buffers)

    def _recv_exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view, have = memoryview(data), 0
        while have < length:
            try:
                got = self.sock.recv_into(view[have:], min(PIECE, length - have))
            except OSError:  # reset, or closed on this side
                got = 0
            if got == 0:
                raise EOFError("the other end is closed")
            have += got
        return data

    def close(self) -> None:
        self.sock.close()


def ready(ends: Sequence[Any], patience_s: float | None) -> list[Any]:
    """Wait at most `patience_s` seconds for data; return the `ends` (channels, sockets) that are
    ready to read. An end closed on this side counts as ready: reading from it raises an error."""
    # Not `select`, which fails for file descriptors above 1,023.
    return [end for end in ends if end.fileno() < 0] or wait(ends, patience_s)


def listener(folder: str) -> tuple[socket.socket, Any]:
    """A listening socket and its address: a Unix socket in `folder` (private to this user, its path
    at most MAX_FOLDER_BYTES bytes) or, without Unix sockets, a port on the loopback interface."""
    address: Any = f"{folder}/driver"
    if hasattr(socket, "AF_UNIX"):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(address)
    else:
        sock = socket.socket(socket.AF_INET)
        sock.bind(("127.0.0.1", 0))
        address = sock.getsockname()
    sock.listen(512)
    return sock, address


def loopback() -> str | None:
    """The name of the loopback interface, if known."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    return next((name for name in names if name in ("lo", "lo0")), None)


def connect(address: Any, hello: bytes) -> socket.socket:
    """Connect to the driver and send `hello`. Raises EOFError if the driver is gone."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.connect(address)
        sock.sendall(hello)
    except OSError as error:
        raise EOFError(f"the driver is not listening: {error}") from None
    return sock
