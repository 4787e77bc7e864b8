"""Watch a collective: run it on real ranks and note each message, and what is in the buffer then.

    movement = watch_collective(world, "all_reduce", "ring")       # one of labkit's algorithms
    movement = watch_collective(world, "all_reduce", my_function)  # yours: my_function(comm, x)
    plot.movement(movement)

The ranks move numbers that can be told apart (labkit/trace/movement.py). Each send copies what it
sends at once, and what is received is put in its place when it is waited for: so the picture is
the same on every run.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

from labkit.comm import Comm
from labkit.comm.collectives import ALGORITHMS, POWERS_OF_TWO_ONLY, Algorithm, run
from labkit.comm.collectives.steps import STREAM
from labkit.events import ranks_in_words
from labkit.runtime.transports.wire import Wire, Work
from labkit.trace.movement import MOST_RANKS, Key, Movement, Note, movement_of, number

Student = Callable[[Any, torch.Tensor], object]
WATCHED = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
)  # fmt: skip


class Ranks(Protocol):
    """A `World`, as far as it is needed here."""

    size: int

    def run(self, fn: Callable[..., Any], /, *args: Any) -> list[Any]: ...


def watch_collective(
    world: Ranks,
    collective: str,
    algorithm: str | Student,
    root: int = 0,
    ranks_per_node: int | None = None,
) -> Movement:
    """Run a collective once on the ranks of `world`, and return how its data moved.

    Args:
        world: 2 to 8 ranks, `World(n, backend="gloo")`.
        collective: what the ranks hold at first. "all_reduce", "reduce_scatter" and "reduce": each
            its own number in every chunk; "all_gather" and "gather": in chunk `rank` alone;
            "broadcast" and "scatter": only `root`, in every chunk.
        algorithm: a name, as "ring" or "tree", or a function of (comm, x) that does it in place by
            `comm.send`, `recv`, `isend` and `irecv`. `x` is an int64 tensor of one element for each
            rank, which is one chunk.
        ranks_per_node: for the hierarchical all-reduce.

    Raises ValueError for a name that is not there, too many ranks, or a function that sends
    nothing; RankError as `World.run` does.
    """
    _check(collective, algorithm, world.size)
    logs = world.run(_on_rank, collective, algorithm, root, ranks_per_node or world.size)
    by = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "function")
    movement = movement_of(f"{collective} by {by}", logs)
    if not movement.frames:
        raise ValueError(
            f"{by} sent nothing through comm.send or comm.isend: there is nothing to see. Only "
            "messages are watched, no ready collectives"
        )
    return movement


def _check(collective: str, algorithm: str | Student, size: int) -> None:
    if collective not in WATCHED:
        raise ValueError(f"{collective!r} cannot be watched; choose one of {', '.join(WATCHED)}")
    if not 2 <= size <= MOST_RANKS:
        raise ValueError(
            f"{ranks_in_words(size)} cannot be watched; make a World of 2 to {MOST_RANKS}"
        )
    if callable(algorithm):
        return
    able = [
        name
        for name in ALGORITHMS[collective]
        if (collective, name) not in POWERS_OF_TWO_ONLY or not size & (size - 1)
    ]
    if algorithm not in able:
        raise ValueError(
            f"{collective} on {ranks_in_words(size)} has no algorithm {algorithm!r}; choose one of "
            f"{', '.join(able)}, or give a function of (comm, x)"
        )


def _on_rank(
    collective: str, algorithm: str | Student, root: int, ranks_per_node: int
) -> list[Note]:
    comm = Comm()
    x = _at_first(collective, comm.rank, comm.size, root)
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


def _at_first(collective: str, rank: int, size: int, root: int) -> torch.Tensor:
    """One number for each chunk; 0 where there is nothing yet."""
    has: dict[str, Callable[[int], bool]] = {
        "all_gather": lambda chunk: chunk == rank,
        "gather": lambda chunk: chunk == rank,
        "broadcast": lambda chunk: rank == root,
        "scatter": lambda chunk: rank == root,
    }
    mine = has.get(collective, lambda chunk: True)
    return torch.tensor([number(rank, c, size) if mine(c) else 0 for c in range(size)])


def _started(
    collective: str, algorithm: Callable[..., Algorithm], wire: Wire, x: torch.Tensor, root: int
) -> Algorithm:
    """One of labkit's, with the arguments of its collective (labkit.comm.collectives)."""

    def add(into: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return into.add_(other)

    chunks = list(x.split(1))
    own, at_root = chunks[wire.rank], chunks if wire.rank == root else None
    match collective:
        case "all_reduce":
            return algorithm(wire, x, add, 1, 0)
        case "reduce":
            return algorithm(wire, x, root, add, 0)
        case "reduce_scatter":
            return algorithm(wire, chunks, own, add, 0)
        case "all_gather":
            return algorithm(wire, chunks, 0)
        case "broadcast":
            return algorithm(wire, x, root, 0)
    return algorithm(wire, own, at_root, root, 0)  # gather, scatter


class WatchedComm:
    """A `Comm` whose messages are noted, together with the buffer `x`."""

    def __init__(self, comm: Comm, x: torch.Tensor):
        self._comm, self._x = comm, x
        self.rank, self.size, self.ranks = comm.rank, comm.size, comm.ranks
        self.notes: list[Note] = []
        self._messages: Counter[tuple[int, int, int]] = Counter()

    def send(self, x: torch.Tensor, dst: int, tag: int = 0) -> None:
        key = self._posted("send", (self.rank, dst, tag), self._sent(x))
        self._comm.send(x, dst, tag)
        self.note("wait", key)

    def recv(self, x: torch.Tensor, src: int, tag: int = 0) -> None:
        key = self._posted("recv", (src, self.rank, tag))
        arrived = torch.empty_like(x)
        self._comm.recv(arrived, src, tag)
        self.note("wait", key)
        x.copy_(arrived)

    def isend(self, x: torch.Tensor, dst: int, tag: int = 0) -> "Watched":
        key = self._posted("send", (self.rank, dst, tag), self._sent(x))
        return Watched(self, key, self._comm.isend(x.clone(), dst, tag))

    def irecv(self, x: torch.Tensor, src: int, tag: int = 0) -> "Watched":
        key = self._posted("recv", (src, self.rank, tag))
        arrived = torch.empty_like(x)
        return Watched(self, key, self._comm.irecv(arrived, src, tag), lambda: x.copy_(arrived))

    def note(
        self,
        kind: Literal["send", "recv", "wait", "end"],
        key: Key = (0, 0, 0, 0),
        sent: tuple[tuple[int | None, int], ...] = (),
    ) -> None:
        self.notes.append(Note(kind, tuple(self._x.tolist()), key, sent))

    def _posted(
        self,
        kind: Literal["send", "recv"],
        ends: tuple[int, int, int],
        sent: tuple[tuple[int | None, int], ...] = (),
    ) -> Key:
        key = (*ends, self._messages[ends])
        self._messages[ends] += 1
        self.note(kind, key, sent)
        return key

    def _sent(self, x: torch.Tensor) -> tuple[tuple[int | None, int], ...]:
        """The numbers in `x`, each with its place in the buffer, where it is a piece of that."""
        places: list[int | None] = [None] * x.numel()
        if x.untyped_storage().data_ptr() == self._x.untyped_storage().data_ptr():
            inside = torch.arange(self._x.numel()).as_strided(
                x.shape, x.stride(), x.storage_offset()
            )
            places = list(inside.reshape(-1).tolist())
        return tuple(zip(places, x.reshape(-1).tolist()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


class Watched:
    """A message under way."""

    def __init__(
        self, comm: WatchedComm, key: Key, work: Work, finish: Callable[[], object] | None = None
    ):
        self._comm, self._key, self._work, self._finish = comm, key, work, finish
        self._waited = False

    def wait(self) -> None:
        self._work.wait()
        if not self._waited:
            self._waited = True
            self._comm.note("wait", self._key)
            if self._finish is not None:
                self._finish()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class WatchedWire(Wire):
    """A wire for labkit's algorithms whose messages go through a watched `Comm`."""

    def __init__(self, comm: WatchedComm, nodes: Sequence[Sequence[int]]):
        self._comm, self.nodes = comm, nodes
        self.rank, self.size = comm.rank, comm.size

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._comm.isend(x, peer, tag // STREAM)  # the door's tags are small

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._comm.irecv(x, peer, tag // STREAM)
