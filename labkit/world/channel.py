"""Messages between the driver and its ranks, over a local socket.

A message is a pickle and the large buffers in it (tensors, mostly), which are sent from where they
lie and received into where they stay: nothing large is copied on the way.

    | number of parts | length of each | pickle | buffer | buffer ...
"""

import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

LENGTH = struct.Struct("<Q")
PIECE = 1 << 20
LOOK_S = 0.05
_UNIX = hasattr(socket, "AF_UNIX")
LONGEST_ADDRESS = 100  # of a socket that is a file: 103 bytes on macOS, 107 on Linux


class Channel:
    """One end of a stream of messages. Raises EOFError when the other end is gone.

    `look` is called many times a second while a message is under way, and may raise to stop it;
    the channel is closed then, since what follows half a message cannot be understood.
    """

    def __init__(self, sock: socket.socket, look: Callable[[], None] | None = None):
        self.sock, self._look = sock, look or (lambda: None)
        sock.settimeout(LOOK_S if look else None)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Any) -> None:
        """Send anything that plain pickle takes."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(data), *(buffer.raw() for buffer in buffers)]
        lengths = [len(parts), *(part.nbytes for part in parts)]
        with self._whole_message():
            header = b"".join(LENGTH.pack(length) for length in lengths)
            for view in (memoryview(header), *parts):
                while view:
                    with suppress(TimeoutError):
                        view = view[self.sock.send(view[:PIECE]) :]
                    self._look()

    def recv(self) -> Any:
        """The next message, waiting for it."""
        with self._whole_message():
            (count,) = LENGTH.unpack(self._exactly(LENGTH.size))
            lengths = [LENGTH.unpack(self._exactly(LENGTH.size))[0] for _ in range(count)]
            data, *buffers = [self._exactly(length) for length in lengths]
        return pickle.loads(data, buffers=buffers)

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            with suppress(TimeoutError):
                received = self.sock.recv_into(view[:PIECE])
                if received == 0:
                    raise EOFError("the other end is gone")
                view = view[received:]
            self._look()
        return data

    @contextmanager
    def _whole_message(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:  # reset, or closed on this side
            raise EOFError(f"the other end is gone: {error}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.sock.close()


def ready(ends: Sequence[Any], patience_s: float | None) -> list[Any]:
    """Those of `ends` (channels, sockets) that have something to read, within `patience_s`.
    (Not `select`, which knows no file numbers above 1,023.) An end closed here counts as ready:
    reading it raises."""
    return [end for end in ends if end.fileno() < 0] or wait(ends, patience_s)


def fits_socket(folder: str) -> bool:
    """Whether the path of a socket in `folder` is short enough for the system."""
    return len(os.fsencode(f"{folder}/driver")) <= LONGEST_ADDRESS or not _UNIX


def listener(folder: str) -> tuple[socket.socket, Any]:
    """A socket to be reached from this machine only, and its address: a file in `folder`, which
    only this user can enter. On platforms without such sockets, a free port of the loopback."""
    address: Any = f"{folder}/driver"
    if _UNIX:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(address)
    else:
        sock = socket.socket(socket.AF_INET)
        sock.bind(("127.0.0.1", 0))
        address = sock.getsockname()
    sock.listen(512)
    return sock, address


def connect(address: Any, hello: bytes) -> socket.socket:
    """Reach the driver at `address` and say who is there. Raises EOFError if it listens no more."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.connect(address)
        sock.sendall(hello)
    except (FileNotFoundError, ConnectionError) as error:
        sock.close()
        raise EOFError(f"the driver does not listen at {address}: {error}") from None
    return sock
