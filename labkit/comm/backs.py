"""The transports behind the door: who really carries the bytes.

    SendReceive   the readable algorithms over a wire: any group with a modelled `Link`
    Gloo          the same, but for large all-reduces of fp32 and fp64, which are gloo's own
    Native        the backend's own collectives: NCCL
    Nothing       a fake process group: events are recorded, nothing moves
    Shared        memory that the ranks of one machine share: in `labkit.comm.shm`

All have the methods of `Back`, over flat contiguous tensors, and return work to wait for.
Why not all of gloo's own collectives: its reduce-scatter is an all-reduce inside and moves twice
the bytes, and several dtypes are missing. Its all-reduce is a ring as ours, and sends the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

from labkit.comm import algorithms
from labkit.comm.algorithms import Algorithm, Chunks, Reduction
from labkit.comm.surroundings import here
from labkit.comm.wire import Lane, LaneWork, Posted, Wire, Work, living
from labkit.events import chunk_sizes

REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda x, y: x.add_(y),
    "mean": lambda x, y: x.add_(y),  # and a division once the sum is complete
    "min": lambda x, y: torch.minimum(x, y, out=x),
    "max": lambda x, y: torch.maximum(x, y, out=x),
    "product": lambda x, y: x.mul_(y),
}


GLOO_DTYPES = (torch.float32, torch.float64)
GLOO_BYTES = 1 << 18  # from here on, gloo's own all-reduce is the faster
PIECE_BYTES = 1 << 20  # a longer chunk travels in pieces: one is reduced while others are sent


class Call(NamedTuple):
    """One call of an operation: its tag, and whether the caller goes on before it is done."""

    tag: int
    asynchronous: bool


class Back(ABC):
    """Carries the operations of one group; tensors are flat and contiguous, roots are ranks
    inside the group, `chunks` are n tensors, chunk i belonging to rank i. `transport` is the name
    that its events carry."""

    transport = ""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> Work: ...
    @abstractmethod
    def reduce_scatter(self, out: torch.Tensor, chunks: Chunks, op: str, call: Call) -> Work: ...
    @abstractmethod
    def all_gather(self, chunks: Chunks, x: torch.Tensor, call: Call) -> Work: ...
    @abstractmethod
    def broadcast(self, x: torch.Tensor, root: int, call: Call) -> Work: ...
    @abstractmethod
    def reduce(self, x: torch.Tensor, root: int, op: str, call: Call) -> Work: ...
    @abstractmethod
    def gather(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work: ...
    @abstractmethod
    def scatter(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work: ...
    @abstractmethod
    def all_to_all(self, outs: Chunks, ins: Chunks, call: Call) -> Work: ...
    @abstractmethod
    def barrier(self, note: torch.Tensor, call: Call) -> Work: ...
    @abstractmethod
    def send(self, x: torch.Tensor, peer: int, call: Call) -> Work: ...
    @abstractmethod
    def receive(self, x: torch.Tensor, peer: int, call: Call) -> Work: ...


class SendReceive(Back):
    """The algorithms of `labkit.comm.algorithms`; asynchronous ones run on a lane of their own.
    The work's `wait` returns the bytes this rank sent."""

    transport = "gloo"

    def __init__(self, wire: Wire):
        self.wire = wire
        self._lane: Lane | None = None

    def _start(self, call: Call, algorithms_of_it: Callable[[], Sequence[Algorithm]]) -> Work:
        def function() -> int:
            with here.carrying():
                return algorithms.run(*algorithms_of_it())

        if not call.asynchronous:
            return LaneWork(function).run()
        if self._lane is None:
            self._lane = Lane("labkit collectives")
        return self._lane.submit(function)

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> Work:
        """Rings, one for each piece: 2(n-1)/n S from every rank."""
        divide_by = self.wire.size if op == "mean" else 1

        def rings() -> list[Algorithm]:
            chunks = list(x.split(chunk_sizes(x.numel(), self.wire.size)))
            return [
                algorithms.ring_all_reduce(self.wire, piece, REDUCTIONS[op], divide_by, call.tag)
                for piece in _pieces(chunks)
            ]

        return self._start(call, rings)

    def reduce_scatter(self, out: torch.Tensor, chunks: Chunks, op: str, call: Call) -> Work:
        wire, reduce = self.wire, REDUCTIONS[op]
        own = chunks[wire.rank]
        apart = out.data_ptr() == own.data_ptr() or not _share_memory(out, *chunks)

        def ring() -> Algorithm:
            target = out if apart else own.clone()  # the other chunks are still to be sent
            sent = yield from algorithms.ring_reduce_scatter(wire, chunks, target, reduce, call.tag)
            if op == "mean":
                target.div_(wire.size)
            if target is not out:
                out.copy_(target)
            return sent

        return self._start(call, lambda: [ring()])

    def all_gather(self, chunks: Chunks, x: torch.Tensor, call: Call) -> Work:
        def rings() -> list[Algorithm]:
            own = chunks[self.wire.rank]
            if own.data_ptr() != x.data_ptr():
                own.copy_(x)
            return [
                algorithms.ring_all_gather(self.wire, piece, call.tag) for piece in _pieces(chunks)
            ]

        return self._start(call, rings)

    def broadcast(self, x: torch.Tensor, root: int, call: Call) -> Work:
        return self._start(call, lambda: [algorithms.tree_broadcast(self.wire, x, root, call.tag)])

    def reduce(self, x: torch.Tensor, root: int, op: str, call: Call) -> Work:
        def tree() -> Algorithm:
            at_root = self.wire.rank == root
            own = x if at_root else x.clone()  # partial sums stay private
            sent = yield from algorithms.tree_reduce(self.wire, own, root, REDUCTIONS[op], call.tag)
            if op == "mean" and at_root:
                x.div_(self.wire.size)
            return sent

        return self._start(call, lambda: [tree()])

    def gather(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work:
        return self._start(
            call, lambda: [algorithms.flat_gather(self.wire, x, chunks, root, call.tag)]
        )

    def scatter(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work:
        return self._start(
            call, lambda: [algorithms.flat_scatter(self.wire, x, chunks, root, call.tag)]
        )

    def all_to_all(self, outs: Chunks, ins: Chunks, call: Call) -> Work:
        def pairwise() -> list[Algorithm]:
            leaving = [x.clone() if _share_memory(x, *outs) else x for x in ins]
            return [algorithms.pairwise_all_to_all(self.wire, outs, leaving, call.tag)]

        return self._start(call, pairwise)

    def barrier(self, note: torch.Tensor, call: Call) -> Work:
        return self._start(
            call, lambda: [algorithms.dissemination_barrier(self.wire, note, call.tag)]
        )

    def send(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        return Posted(self.wire.isend(x, peer, call.tag))

    def receive(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        return Posted(self.wire.irecv(x, peer, call.tag))


class Gloo(SendReceive):
    """Send and receive, but gloo's own all-reduce where it is the faster of two equal ones."""

    def __init__(self, group: Any):
        super().__init__(Wire(group))
        self._own = Native(group)

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> Work:
        if x.dtype in GLOO_DTYPES and op != "mean" and x.nbytes >= GLOO_BYTES:
            return self._own.all_reduce(x, op, call)
        return super().all_reduce(x, op, call)


class Native(Back):
    """torch.distributed's own collectives, for backends that are good at them: NCCL.

    What the backend really sends it does not tell; the door then takes the formula's bytes.
    """

    def __init__(self, group: Any, backend: str = "gloo"):
        self._group = ref(group)
        self.transport = backend
        self._rank: int = group.rank()
        self._global = dist.get_process_group_ranks(group)

    @property
    def group(self) -> Any:
        return living(self._group)

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> Work:
        return dist.all_reduce(x, _torch_op(op), group=self.group, async_op=True)

    def reduce_scatter(self, out: torch.Tensor, chunks: Chunks, op: str, call: Call) -> Work:
        return dist.reduce_scatter(out, chunks, _torch_op(op), group=self.group, async_op=True)

    def all_gather(self, chunks: Chunks, x: torch.Tensor, call: Call) -> Work:
        return dist.all_gather(chunks, x, group=self.group, async_op=True)

    def broadcast(self, x: torch.Tensor, root: int, call: Call) -> Work:
        return dist.broadcast(x, self._global[root], group=self.group, async_op=True)

    def reduce(self, x: torch.Tensor, root: int, op: str, call: Call) -> Work:
        own = x if self._rank == root else x.clone()
        return dist.reduce(own, self._global[root], _torch_op(op), self.group, async_op=True)

    def gather(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work:
        return dist.gather(x, chunks, self._global[root], self.group, async_op=True)

    def scatter(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work:
        return dist.scatter(x, chunks, self._global[root], self.group, async_op=True)

    def all_to_all(self, outs: Chunks, ins: Chunks, call: Call) -> Work:
        return dist.all_to_all(outs, ins, group=self.group, async_op=True)

    def barrier(self, note: torch.Tensor, call: Call) -> Work:
        return dist.barrier(self.group, async_op=True)

    def send(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        return self.group.send([x], peer, call.tag)

    def receive(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        return self.group.recv([x], peer, call.tag)


class Nothing(Back):
    """Fake communication, for worlds on paper: every operation is over at once, nothing moves."""

    transport = "fake"

    def _done(self, *_: Any, **__: Any) -> Work:
        return LaneWork(lambda: 0).run()

    all_reduce = reduce_scatter = all_gather = broadcast = reduce = gather = scatter = _done
    all_to_all = barrier = send = receive = _done


def _pieces(chunks: Chunks) -> list[Chunks]:
    """Cut every chunk into the same number of pieces, none above PIECE_BYTES; piece k of all."""
    count = max(1, -(-max(chunk.nbytes for chunk in chunks) // PIECE_BYTES))
    return [list(piece) for piece in zip(*(chunk.tensor_split(count) for chunk in chunks))]


def _share_memory(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether `x` is in the same storage as one of the others (and so may overlap with it)."""
    storage = x.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == storage for other in others)


def _torch_op(op: str) -> Any:
    return dist.ReduceOp.AVG if op == "mean" else getattr(dist.ReduceOp, op.upper())
