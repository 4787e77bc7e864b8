"""torch.distributed's own collectives, and fake communication for dry runs."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from labkit.comm.collectives.steps import Chunks
from labkit.runtime.transports.chooser import Choice
from labkit.runtime.transports.transport import Call, Chosen, Kind, Transport, share_memory
from labkit.runtime.transports.wire import LaneWork, Work, dereferenced


class Native(Transport):
    """A backend's own collectives: NCCL's, and gloo's all-reduce. Events count bytes by formula."""

    def __init__(self, group: Any, backend: str):
        self._group = ref(group)
        self._rank: int = group.rank()
        self._global = dist.get_process_group_ranks(group)
        self.name = backend

    def choose(self, collective: str, nbytes: int, x: Kind, asked: str) -> Chosen:
        if asked not in ("", self.name):
            raise ValueError(
                f"{collective} by {asked!r}: {self.name} chooses its own algorithms (for NCCL, "
                "see NCCL_ALGO); omit `algorithm`, or use a gloo group"
            )
        return self, self.name

    def explain(self, collective: str, nbytes: int, x: Kind, asked: str) -> Choice:
        _, name = self.choose(collective, nbytes, x, asked)
        return Choice(collective, name, f"{name} chooses the algorithm itself")

    @property
    def group(self) -> Any:
        return dereferenced(self._group)

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
        try:
            return dist.all_to_all(outs, ins, group=self.group, async_op=True)
        except RuntimeError as error:
            if "does not support alltoall" not in str(error):
                raise
        # In torch 2.11, gloo has no all-to-all for lists, only for flat buffers.
        received, sent = ([x.numel() for x in chunks] for chunks in (outs, ins))
        flat, joined = (torch.cat([x.flatten() for x in chunks]) for chunks in (outs, ins))
        dist.all_to_all_single(flat, joined, received, sent, group=self.group)
        for out, part in zip(outs, flat.split(received), strict=True):
            out.copy_(part.view_as(out))
        return LaneWork(lambda: 0).run()

    def barrier(self, note: torch.Tensor, call: Call) -> Work:
        devices = [note.device.index] if note.is_cuda else None  # by default, torch uses gloo
        return dist.barrier(self.group, async_op=True, device_ids=devices)

    def ring_exchange(self, out: torch.Tensor, x: torch.Tensor, call: Call) -> Work:
        """Batch send and receive: a separate NCCL send would wait for a receive not yet posted."""
        n = len(self._global)
        leaving = x.clone() if n == 1 or share_memory(x, out) else x
        if n == 1:
            out.copy_(leaving)
            return LaneWork(lambda: 0).run()
        ahead, behind = self._global[(self._rank + 1) % n], self._global[self._rank - 1]
        messages = [
            dist.P2POp(dist.isend, leaving, ahead, self.group),
            dist.P2POp(dist.irecv, out, behind, self.group),
        ]
        return All(dist.batch_isend_irecv(messages))

    def send(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        return self.group.send([x], peer, call.tag)

    def receive(self, x: torch.Tensor, peer: int, call: Call) -> Work:
        return self.group.recv([x], peer, call.tag)


class All:
    """Several works as one, without a byte count: events count bytes by formula."""

    def __init__(self, works: Sequence[Any]):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Nothing(Transport):
    """Fake communication, for dry runs: operations end immediately and move no data."""

    name = "fake"

    def choose(self, collective: str, nbytes: int, x: Kind, asked: str) -> Chosen:
        return self, asked

    def explain(self, collective: str, nbytes: int, x: Kind, asked: str) -> Choice:
        return Choice(collective, "nothing", "a dry run moves no bytes")

    def _done(self, *_: Any, **__: Any) -> Work:
        return LaneWork(lambda: 0).run()

    all_reduce = reduce_scatter = all_gather = broadcast = reduce = gather = scatter = _done
    all_to_all = barrier = ring_exchange = send = receive = _done


def _torch_op(op: str) -> Any:
    return dist.ReduceOp.AVG if op == "mean" else getattr(dist.ReduceOp, op.upper())
