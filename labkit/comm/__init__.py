"""Communicators and meshes, with simulated links, call checks and event listeners."""

from labkit.comm.communicator import Comm
from labkit.comm.handle import CommError, Handle
from labkit.comm.mesh import Mesh
from labkit.runtime.board import Board, CollectiveMismatch
from labkit.runtime.process_context import here, listen, listen_with
from labkit.runtime.transports.link import Link, TwoLevel
from labkit.runtime.transports.wire import paced_bytes

__all__ = [
    "Board",
    "CollectiveMismatch",
    "Comm",
    "CommError",
    "Handle",
    "Link",
    "Mesh",
    "TwoLevel",
    "here",
    "listen",
    "listen_with",
    "paced_bytes",
]
