"""The transports of a communicator, which move the bytes.

    SendReceive   the readable algorithms over messages (gloo, or any backend with a modeled
                  `Link`); without a link, also gloo's own all-reduce for fp32 and fp64
    Native        the backend's own collectives: NCCL (native.py)
    Nothing       a fake process group: events are recorded, but no data moves
    Shared        memory that the ranks of one machine share (shm)

gloo's other collectives are not used: its reduce-scatter runs an all-reduce, which moves twice the
bytes, and several dtypes are unsupported. gloo's all-reduce is a ring and sends equal bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.comm.collectives import ALGORITHMS, EQUAL_SIZES_ONLY
from labkit.comm.collectives.steps import Algorithm, Chunks, Reduction, run
from labkit.runtime.process_context import here
from labkit.runtime.transports.chooser import GLOO, Choice, Chooser
from labkit.runtime.transports.native import Native
from labkit.runtime.transports.transport import Call, Chosen, Kind, Transport, private, share_memory
from labkit.runtime.transports.wire import Lane, LaneWork, Posted, Wire, Work

REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda x, y: x.add_(y),
    "mean": lambda x, y: x.add_(y),  # divided once the sum is complete
    "min": lambda x, y: torch.minimum(x, y, out=x),
    "max": lambda x, y: torch.maximum(x, y, out=x),
    "product": lambda x, y: x.mul_(y),
}
GLOO_DTYPES = (torch.float32, torch.float64)


class SendReceive(Transport):
    """The algorithms of `labkit.comm.collectives`; asynchronous calls run on a lane. The work's
    `wait` returns the bytes that this rank sent. `gloo`, if any, runs gloo's own all-reduce."""

    name = "gloo"

    def __init__(self, wire: Wire, gloo: Native | None = None):
        self.wire, self._gloo = wire, gloo
        self.chooser = Chooser(wire.size)
        self.forced = self.chooser.forced
        self._lane: Lane | None = None

    def choose(self, collective: str, nbytes: int, x: Kind, asked: str) -> Chosen:
        return self, self.chooser.choose(collective, nbytes, self._gloo_reduces(x), asked)

    def explain(self, collective: str, nbytes: int, x: Kind, asked: str) -> Choice:
        return self.chooser.explain(collective, nbytes, self._gloo_reduces(x), asked)

    def _gloo_reduces(self, x: Kind) -> bool:
        return self._gloo is not None and x.dtype in GLOO_DTYPES and x.op != "mean"

    def _start(self, call: Call, algorithm: Callable[[], Algorithm]) -> Work:
        def function() -> int:
            with here.carrying():
                return run(algorithm())

        if not call.asynchronous:
            return LaneWork(function).run()
        if self._lane is None:
            self._lane = Lane("labkit collectives")
        return self._lane.put(LaneWork(function))

    def _run(self, collective: str, call: Call, *args: Any) -> Work:
        algorithm = ALGORITHMS[collective][call.algorithm]
        return self._start(call, lambda: algorithm(self.wire, *args, call.tag))

    def all_reduce(self, x: torch.Tensor, op: str, call: Call) -> Work:
        if call.algorithm == GLOO and self._gloo is not None:
            return self._gloo.all_reduce(x, op, call)
        divide_by = self.wire.size if op == "mean" else 1
        return self._run("all_reduce", call, x, REDUCTIONS[op], divide_by)

    def reduce_scatter(self, out: torch.Tensor, chunks: Chunks, op: str, call: Call) -> Work:
        algorithm, wire = ALGORITHMS["reduce_scatter"][call.algorithm], self.wire
        own = chunks[wire.rank]
        direct = out.data_ptr() == own.data_ptr() or not share_memory(out, *chunks)

        def scattering() -> Algorithm:
            target = out if direct else own.clone()  # the other chunks are still to be sent
            sent_bytes = yield from algorithm(wire, chunks, target, REDUCTIONS[op], call.tag)
            if op == "mean":
                target.div_(wire.size)
            if target is not out:
                out.copy_(target)
            return sent_bytes

        return self._start(call, scattering)

    def all_gather(self, chunks: Chunks, x: torch.Tensor, call: Call) -> Work:
        algorithm = ALGORITHMS["all_gather"][call.algorithm]

        def gathering() -> Algorithm:
            own = chunks[self.wire.rank]
            if own.data_ptr() != x.data_ptr():
                own.copy_(x)
            return algorithm(self.wire, chunks, call.tag)

        return self._start(call, gathering)

    def broadcast(self, x: torch.Tensor, root: int, call: Call) -> Work:
        return self._run("broadcast", call, x, root)

    def reduce(self, x: torch.Tensor, root: int, op: str, call: Call) -> Work:
        algorithm = ALGORITHMS["reduce"][call.algorithm]

        def reducing() -> Algorithm:
            at_root = self.wire.rank == root
            own = x if at_root else x.clone()  # partial sums stay private
            sent_bytes = yield from algorithm(self.wire, own, root, REDUCTIONS[op], call.tag)
            if op == "mean" and at_root:
                x.div_(self.wire.size)
            return sent_bytes

        return self._start(call, reducing)

    def gather(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work:
        _check_sizes("gather", chunks, call.algorithm)
        return self._run("gather", call, x, chunks, root)

    def scatter(self, x: torch.Tensor, chunks: Chunks | None, root: int, call: Call) -> Work:
        _check_sizes("scatter", chunks, call.algorithm)
        return self._run("scatter", call, x, chunks, root)

    def all_to_all(self, outs: Chunks, ins: Chunks, call: Call) -> Work:
        algorithm = ALGORITHMS["all_to_all"][call.algorithm]
        return self._start(
            call,
            lambda: algorithm(self.wire, outs, [private(x, *outs) for x in ins], call.tag),
        )

    def barrier(self, note: torch.Tensor, call: Call) -> Work:
        return self._run("barrier", call, note)

    def ring_exchange(self, out: torch.Tensor, x: torch.Tensor, call: Call) -> Work:
        algorithm = ALGORITHMS["ring_exchange"][call.algorithm]
        return self._start(call, lambda: algorithm(self.wire, out, private(x, out), call.tag))

    def send(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        return Posted(self.wire.isend(x, peer, call.tag))

    def receive(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        return Posted(self.wire.irecv(x, peer, call.tag))


def _check_sizes(collective: str, chunks: Sequence[torch.Tensor] | None, algorithm: str) -> None:
    sizes = [chunk.numel() for chunk in chunks or ()]
    if (collective, algorithm) in EQUAL_SIZES_ONLY and len(set(sizes)) > 1:
        raise ValueError(
            f"{collective} by {algorithm} needs equal sizes on all ranks, not {sizes}: ranks that "
            "forward data must know how many elements arrive; use 'flat'"
        )
