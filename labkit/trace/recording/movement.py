"""Watch a collective: run it on real ranks and record each message and the buffer contents.

    movement = watch_collective(world, "all_reduce", "ring")       # one of labkit's algorithms
    movement = watch_collective(world, "all_reduce", my_function)  # your own: my_function(comm, x)
    plot.movement(movement)

The ranks send integers with decodable sums (labkit/trace/movement.py). A send copies its data
immediately, and a receive writes its data in `wait`, so every run yields the same picture.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from labkit.comm import Comm
from labkit.comm.collectives import ALGORITHMS, POWERS_OF_TWO_ONLY
from labkit.comm.collectives.steps import STREAM, Algorithm, run
from labkit.events import ranks_in_words
from labkit.runtime.transports.wire import Wire, Work
from labkit.trace.movement import MAX_RANKS, Key, Kind, Movement, Note, Sent, movement_of, number

Student = Callable[[Any, torch.Tensor], object]
WATCHED = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
)  # fmt: skip


class Ranks(Protocol):
    """The part of `World` that this module uses."""

    size: int

    def run(self, fn: Callable[..., Any], /, *args: Any) -> list[Any]: ...


def watch_collective(
    world: Ranks,
    collective: str,
    algorithm: str | Student,
    root: int = 0,
    ranks_per_node: int | None = None,
) -> Movement:
    """Run a collective once on the ranks of `world`, and return the movement of its data.

    Args:
        world: a world of 2 to 8 ranks, such as `World(4, backend="gloo")`.
        collective: determines the initial contents. "all_reduce", "reduce_scatter", "reduce": each
            rank's integer in every chunk; "all_gather", "gather": in chunk `rank` only;
            "broadcast", "scatter": in every chunk, on `root` only.
        algorithm: a name such as "ring" or "tree", or a function of (comm, x) that updates x using
            `comm.send`, `recv`, `isend` and `irecv`. `x`: int64, one element (a chunk) per rank.
        ranks_per_node: node size for the hierarchical all-reduce.

    Raises ValueError for an unknown name, an invalid world size, or a function that sends nothing,
    and RankError as `World.run` does.
    """
    size = world.size
    if collective not in WATCHED:
        raise ValueError(f"{collective!r} cannot be watched; choose one of {', '.join(WATCHED)}")
    if not 2 <= size <= MAX_RANKS:
        raise ValueError(
            f"{ranks_in_words(size)} cannot be watched; create a World of 2 to {MAX_RANKS} ranks"
        )
    available = [
        name
        for name in ALGORITHMS[collective]
        if (collective, name) not in POWERS_OF_TWO_ONLY or not size & (size - 1)
    ]
    if not callable(algorithm) and algorithm not in available:
        raise ValueError(
            f"{collective} on {ranks_in_words(size)} has no algorithm {algorithm!r}; choose one of "
            f"{', '.join(available)}, or pass a function of (comm, x)"
        )
    logs = world.run(_on_rank, collective, algorithm, root, ranks_per_node or size)
    by = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "function")
    movement = movement_of(f"{collective} by {by}", logs)
    if not movement.frames:
        raise ValueError(
            f"{by} sent nothing through comm.send or comm.isend; use messages, because "
            "ready-made collectives are not watched"
        )
    return movement


def _on_rank(
    collective: str, algorithm: str | Student, root: int, ranks_per_node: int
) -> list[Note]:
    """Run the collective on this rank, and return the rank's notes."""
    comm = Comm()
    x = torch.zeros(comm.size, dtype=torch.int64)
    for chunk in range(comm.size):
        if collective in ("all_gather", "gather"):
            holds = chunk == comm.rank
        else:
            holds = comm.rank == root or collective not in ("broadcast", "scatter")
        x[chunk] = number(comm.rank, chunk, comm.size) if holds else 0
    watched = WatchedComm(comm, x)
    if callable(algorithm):
        algorithm(watched, x)
    else:
        ranks = list(range(comm.size))
        nodes = [ranks[k : k + ranks_per_node] for k in range(0, comm.size, ranks_per_node)]
        wire = WatchedWire(watched, nodes)
        run(_started(collective, ALGORITHMS[collective][algorithm], wire, x, root))
    watched.note("end")
    return watched.notes


def _started(
    collective: str, algorithm: Callable[..., Algorithm], wire: Wire, x: torch.Tensor, root: int
) -> Algorithm:
    """Start one of labkit's algorithms with the arguments that its collective requires."""
    chunks, add = list(x.split(1)), torch.Tensor.add_
    own, at_root = chunks[wire.rank], chunks if wire.rank == root else None
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (x, add, 1, 0),
        "reduce": (x, root, add, 0),
        "reduce_scatter": (chunks, own, add, 0),
        "all_gather": (chunks, 0),
        "broadcast": (x, root, 0),
        "gather": (own, at_root, root, 0),
        "scatter": (own, at_root, root, 0),
    }
    return algorithm(wire, *arguments[collective])


class WatchedComm:
    """A `Comm` that logs every message and the contents of buffer `x` as notes."""

    def __init__(self, comm: Comm, x: torch.Tensor):
        self._comm, self._x = comm, x
        self.rank, self.size, self.ranks = comm.rank, comm.size, comm.ranks
        self.notes: list[Note] = []
        self._messages: Counter[tuple[int, int, int]] = Counter()

    def send(self, x: torch.Tensor, dst: int, tag: int = 0) -> None:
        key = self._post("send", self.rank, dst, tag, self._contents(x))
        self._comm.send(x, dst, tag)  # blocking, so no copy is needed
        self.note("wait", key)

    def recv(self, x: torch.Tensor, src: int, tag: int = 0) -> None:
        key = self._post("recv", src, self.rank, tag)
        arrived = torch.empty_like(x)
        self._comm.recv(arrived, src, tag)
        self.note("wait", key)
        x.copy_(arrived)

    def isend(self, x: torch.Tensor, dst: int, tag: int = 0) -> Any:
        key = self._post("send", self.rank, dst, tag, self._contents(x))
        return self._handle(key, self._comm.isend(x.clone(), dst, tag))

    def irecv(self, x: torch.Tensor, src: int, tag: int = 0) -> Any:
        key = self._post("recv", src, self.rank, tag)
        arrived = torch.empty_like(x)
        work = self._comm.irecv(arrived, src, tag)
        return self._handle(key, work, lambda: x.copy_(arrived))

    def _handle(self, key: Key, work: Work, finish: Callable[[], object] = lambda: None) -> Any:
        """A handle for a pending message; the first call of `wait` becomes a note."""

        @cache
        def wait() -> None:
            work.wait()
            self.note("wait", key)
            finish()

        return SimpleNamespace(wait=wait, is_completed=work.is_completed)

    def note(self, kind: Kind, key: Key = (0, 0, 0, 0), sent: Sent = ()) -> None:
        self.notes.append(Note(kind, tuple(self._x.tolist()), key, sent))

    def _post(self, kind: Kind, src: int, dst: int, tag: int, sent: Sent = ()) -> Key:
        key = (src, dst, tag, self._messages[src, dst, tag])
        self._messages[src, dst, tag] += 1
        self.note(kind, key, sent)
        return key

    def _contents(self, x: torch.Tensor) -> Sent:
        """(place in the buffer, or None outside the buffer; value) for every element of `x`."""
        places: list[int | None] = [None] * x.numel()
        if x.untyped_storage().data_ptr() == self._x.untyped_storage().data_ptr():
            indices = torch.arange(self._x.numel())
            inside = indices.as_strided(x.shape, x.stride(), x.storage_offset())
            places = list(inside.flatten().tolist())
        return tuple(zip(places, x.flatten().tolist()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


class WatchedWire(Wire):
    """A `Wire` for labkit's algorithms that sends through a watched `Comm`."""

    def __init__(self, comm: WatchedComm, nodes: Sequence[Sequence[int]]):
        self._comm, self.nodes = comm, nodes
        self.rank, self.size = comm.rank, comm.size

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._comm.isend(x, peer, tag // STREAM)  # the communicator accepts only small tags

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._comm.irecv(x, peer, tag // STREAM)
