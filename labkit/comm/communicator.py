"""The communicator: torch.distributed's operations on one process group, with the same names.

A `Comm` also records an event with byte counts per operation, lets ranks compare their calls
before a mismatch can hang them, and accepts any dtype and memory layout on any backend.

    comm = Comm()                                  # the default group
    comm.all_reduce(x)                             # in place, blocking
    handle = comm.all_reduce(x, async_op=True)     # or asynchronous: compute without using x,
    handle.wait()                                  # then wait

By default, runtime/transports/chooser.py selects the `algorithm` (see comm/collectives).
"""

import pickle
import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist

from labkit import events
from labkit.comm.detached import DetachedComm
from labkit.comm.handle import Handle
from labkit.comm.untraced import untraced
from labkit.comm.validation import (
    Tensors,
    check_list,
    check_member,
    check_op,
    check_peer,
    check_rooted,
    describe,
    equal_parts,
)
from labkit.dispatch import no_modes
from labkit.runtime.board import CollectiveMismatch
from labkit.runtime.dispatcher import Dispatcher
from labkit.runtime.process_context import here
from labkit.runtime.transports.chooser import Choice
from labkit.runtime.transports.transport import Call, Kind, Transport
from labkit.runtime.transports.wire import Work

Op = Literal["sum", "mean", "min", "max", "product"]
Finish = list[Callable[[], object]]


@untraced
class Comm:
    """The communicator of one torch.distributed process group (None: the default group).

    `rank`, `size` and arguments such as `src` refer to the group; `ranks` lists its members' global
    ranks. Operations block and return None, or return a `Handle` if `async_op=True`. Tensors are
    dense, of any dtype and shape; the tensors of one call share a dtype. The `..._tensor` and
    `..._single` variants split a contiguous tensor. For `label`, see `labelled`.

    Raises RuntimeError if no process group is initialized, ValueError if this rank is not a member.
    Operations raise TypeError for a non-tensor, ValueError for inconsistent arguments,
    CollectiveMismatch if ranks call different operations, CommError if a running operation fails.
    """

    parallel: "tuple[Comm, list[list[int]]] | None" = None  # on a mesh axis: (mesh Comm, lines)

    def __init__(self, group: Any = None, label: str = ""):
        if not dist.is_initialized():
            raise RuntimeError(
                "Comm(): this process is not a rank yet. Run the function with World(n).run(...), "
                "or call labkit.attach() first (under torchrun, or alone: a world of 1). After "
                "destroy_process_group in a World: world.restart() or %ranks reset."
            )
        group = dist.group.WORLD if group is None else group
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("Comm(group): this rank is not a member of the group")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{group!r:.60} is not a group of ranks; pass a Comm, such as mesh.dp")
        self._group, self._label = group, label and f", {label}"
        self._dispatcher = dispatcher = Dispatcher.of(group)
        dispatcher.users.add(self)
        self.rank, self.size, self.ranks = dispatcher.rank, dispatcher.size, dispatcher.ranks

    @property
    def group(self) -> Any:
        """The process group; after this access, labkit never destroys the group."""
        self._dispatcher.users.add(self._dispatcher)
        return self._group

    def labelled(self, label: str) -> "Comm":
        """A `Comm` of the same group; operations compare `label` across ranks, like shapes."""
        return Comm(self._group, label)

    def __repr__(self) -> str:
        return f"Comm(rank {self.rank} of {self.size}, group {self._dispatcher.name})"

    @staticmethod
    def of(comm: Any = None) -> "Comm":
        """Convert a `Comm`, a process group or None (all ranks) to a `Comm`. A `DetachedComm`
        over all ranks becomes the current `Comm` of all ranks, if one exists."""
        if isinstance(comm, DetachedComm) and comm.is_world and dist.is_initialized():
            return Comm()
        return comm if isinstance(comm, (Comm, DetachedComm)) else Comm(comm)  # type: ignore[return-value]

    def __deepcopy__(self, memo: object = None) -> "Comm":
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        is_world = dist.is_initialized() and self.size == dist.get_world_size()
        return DetachedComm, (self.rank, self.size, self.ranks, is_world)

    def subgroup(self, ranks: Sequence[int], *, shared: bool = False) -> "Comm | None":
        """A `Comm` over some ranks, renumbered in ascending order; None on all other ranks.

        All ranks, members or not, must call this on the `Comm` of all ranks, with the same `ranks`.
        On a mesh axis, all ranks of the mesh must call this; each gets the subgroup of its line.
        `shared` reuses a group that was created with `shared` for the same ranks. A later call or
        `World` run destroys a gloo group once all its ranks have dropped the group's `Comm`.
        """
        for rank in ranks:
            check_member(rank, self.size)
        if self.parallel is not None:
            mesh, lines = self.parallel
            comms = [mesh.subgroup([line[rank] for rank in ranks], shared=shared) for line in lines]
            return next((comm for comm in comms if comm is not None), None)
        if self.size != dist.get_world_size():
            raise ValueError(
                f"subgroup: this Comm has {self.size} of {dist.get_world_size()} ranks; call it "
                "on the Comm of all ranks, on every rank"
            )
        chosen = sorted(set(ranks))
        if len(chosen) != len(ranks) or not chosen:
            raise ValueError(f"subgroup({list(ranks)}): choose at least one rank, each once")
        group = self._dispatcher.new_group([self.ranks[rank] for rank in chosen], shared)
        return Comm(group) if self.rank in chosen else None

    def explain(
        self, collective: str, nbytes: int, algorithm: str = "", op: Op = "sum",
        dtype: torch.dtype = torch.float32,
    ) -> Choice:  # fmt: skip
        """The algorithm chosen for an operation of `nbytes` (all chunks together), and the reason.

        >>> comm.explain("all_reduce", 1 << 20)  # on ranks with backend="gloo"
        all_reduce by gloo: 1048576 bytes on 4 ranks; the table says gloo from 262144 bytes on. ...
        """
        probe = torch.empty(0, dtype=dtype, device=self.own_device())
        transport = self._dispatcher.transport(probe)
        return transport.explain(collective, nbytes, Kind(dtype, op), algorithm)

    def compare(self, what: str, value: Callable[[], str]) -> None:
        """Raises CollectiveMismatch if `value()`, a short text about `what`, differs between ranks.
        All ranks must call this. Compares only under `World(check=True)`; sends nothing."""
        self._dispatcher.compare(what, value)

    def compare_calls(self) -> None:
        """Raises CollectiveMismatch, on all ranks, if the ranks' collectives since the previous
        comparison differ. Sends nothing under `World(check=True)`, which compares every call."""
        calls, backends = [*self._dispatcher.calls], self._dispatcher.backend_of.values()
        self._dispatcher.calls.clear()
        skip = here.board is not None or self.size == 1 or "fake" in backends
        if skip or len({*self.all_gather_object(zlib.crc32(repr(calls).encode()))}) == 1:
            return
        by_position = zip_longest(*self.all_gather_object(calls), fillvalue="nothing more")
        raise CollectiveMismatch(
            "the ranks must call the same collectives in the same order; ranks 0, 1, ... called "
            + " | ".join(next(called for called in by_position if len(set(called)) > 1))
        )

    def symmetric_empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A flat tensor of `numel` elements, with the dtype and device of `like`, for repeated
        reduction (e.g. of a gradient bucket). All ranks must call this with equal `numel`. If ranks
        share memory, an `all_reduce` of the same slice on all ranks copies nothing. Raises
        ValueError for a negative size."""
        if numel < 0:
            raise ValueError(f"symmetric_empty({numel}): choose 0 elements or more")
        return self._dispatcher.symmetric_empty(numel, like)

    # --- collectives that reduce --------------------------------------------------------------

    def all_reduce(
        self, x: torch.Tensor, op: Op = "sum", async_op: bool = False, algorithm: str = ""
    ) -> Handle | None:
        """Replace `x` (any shape) with the reduction of all ranks' `x`, on all ranks."""
        check_op(op, x)
        finish: Finish = []
        flat = self._dispatcher.stage(x, finish)
        return self._dispatcher.collective(
            f"all_reduce({op}{self._label})", x,
            lambda: [n * x.element_size() for n in events.chunk_sizes(x.numel(), self.size)],
            events.all_reduce_bus_bytes, async_op, finish,
            lambda transport, call: transport.all_reduce(flat, op, call),
            nbytes=x.nbytes, reduction=op, algorithm=algorithm,
        )  # fmt: skip

    def reduce(
        self, x: torch.Tensor, dst: int = 0, op: Op = "sum", async_op: bool = False,
        algorithm: str = "",
    ) -> Handle | None:  # fmt: skip
        """Replace `x`, on rank `dst` only, with the reduction of all ranks' `x`."""
        check_op(op, x)
        check_member(dst, self.size)
        finish: Finish = []
        flat = self._dispatcher.stage(x, finish if self.rank == dst else None)
        return self._dispatcher.collective(
            f"reduce({op}, dst={dst})", x, lambda: [x.nbytes], _whole, async_op, finish,
            lambda transport, call: transport.reduce(flat, dst, op, call),
            nbytes=x.nbytes, reduction=op, algorithm=algorithm, peer=dst,
        )  # fmt: skip

    def reduce_scatter(
        self, out: torch.Tensor, ins: Tensors, op: Op = "sum", async_op: bool = False,
        algorithm: str = "",
    ) -> Handle | None:  # fmt: skip
        """Set `out` to the reduction of all ranks' `ins[rank]`; the inputs may differ in size."""
        check_op(op, out)
        check_list("reduce_scatter", "ins", ins, self.rank, self.size, out)
        finish: Finish = []
        flat = self._dispatcher.stage(out, finish)
        chunks = [self._dispatcher.stage(x, None) for x in ins]
        return self._dispatcher.collective(
            f"reduce_scatter({op}{self._label})", out, lambda: [x.nbytes for x in ins],
            events.reduce_scatter_bus_bytes, async_op, finish,
            lambda transport, call: transport.reduce_scatter(flat, chunks, op, call),
            nbytes=sum(x.nbytes for x in ins), reduction=op, algorithm=algorithm, alike=chunks,
        )  # fmt: skip

    def reduce_scatter_tensor(
        self, out: torch.Tensor, x: torch.Tensor, op: Op = "sum", async_op: bool = False,
        algorithm: str = "",
    ) -> Handle | None:  # fmt: skip
        """Split `x` into n equal parts and set `out` to the reduction of part `rank`."""
        parts = equal_parts("reduce_scatter_tensor", x, self.size)
        return self.reduce_scatter(out, parts, op, async_op, algorithm)

    # --- collectives that move data -----------------------------------------------------------

    def broadcast(
        self, x: torch.Tensor, src: int = 0, async_op: bool = False, algorithm: str = ""
    ) -> Handle | None:
        """Replace `x` on all ranks with rank `src`'s `x`."""
        check_member(src, self.size)
        finish: Finish = []
        flat = self._dispatcher.stage(x, finish)
        return self._dispatcher.collective(
            f"broadcast(src={src})", x, lambda: [x.nbytes], _whole, async_op, finish,
            lambda transport, call: transport.broadcast(flat, src, call),
            nbytes=x.nbytes, algorithm=algorithm, peer=src,
        )  # fmt: skip

    def all_gather(
        self, outs: Tensors, x: torch.Tensor, async_op: bool = False, algorithm: str = ""
    ) -> Handle | None:
        """Set `outs[i]` to rank i's `x`, on all ranks; the outputs may differ in size."""
        check_list("all_gather", "outs", outs, self.rank, self.size, x)
        finish: Finish = []
        flat = self._dispatcher.stage(x, None)
        chunks = [self._dispatcher.stage(out, finish) for out in outs]
        return self._dispatcher.collective(
            f"all_gather({self._label[2:]})" if self._label else "all_gather", x,
            lambda: [out.nbytes for out in outs], events.all_gather_bus_bytes, async_op, finish,
            lambda transport, call: transport.all_gather(chunks, flat, call),
            nbytes=sum(out.nbytes for out in outs), algorithm=algorithm, alike=chunks,
        )  # fmt: skip

    def all_gather_into_tensor(
        self, out: torch.Tensor, x: torch.Tensor, async_op: bool = False, algorithm: str = ""
    ) -> Handle | None:
        """Set `out` to the concatenation of all ranks' `x`."""
        parts = equal_parts("all_gather_into_tensor", out, self.size)
        return self.all_gather(parts, x, async_op, algorithm)

    def gather(
        self, x: torch.Tensor, outs: Tensors | None = None, dst: int = 0, async_op: bool = False,
        algorithm: str = "",
    ) -> Handle | None:  # fmt: skip
        """Set `outs[i]` on rank `dst` to rank i's `x`; `outs` is None on the other ranks."""
        finish: Finish = []
        outs = check_rooted("gather", "outs", outs, x, dst, self.rank, self.size)
        chunks = None if outs is None else [self._dispatcher.stage(out, finish) for out in outs]
        flat = self._dispatcher.stage(x, None)
        return self._dispatcher.collective(
            f"gather(dst={dst})", x, lambda: [x.nbytes] * self.size,
            events.reduce_scatter_bus_bytes, async_op, finish,
            lambda transport, call: transport.gather(flat, chunks, dst, call),
            nbytes=0, algorithm=algorithm, peer=dst, alike=(),  # a rank knows only its own size
        )  # fmt: skip

    def scatter(
        self, out: torch.Tensor, ins: Tensors | None = None, src: int = 0, async_op: bool = False,
        algorithm: str = "",
    ) -> Handle | None:  # fmt: skip
        """Set `out` to `ins[rank]` of rank `src`; `ins` is None on the other ranks."""
        finish: Finish = []
        ins = check_rooted("scatter", "ins", ins, out, src, self.rank, self.size)
        chunks = None if ins is None else [self._dispatcher.stage(x, None) for x in ins]
        flat = self._dispatcher.stage(out, finish)
        return self._dispatcher.collective(
            f"scatter(src={src})", out, lambda: [out.nbytes] * self.size,
            events.reduce_scatter_bus_bytes, async_op, finish,
            lambda transport, call: transport.scatter(flat, chunks, src, call),
            nbytes=0, algorithm=algorithm, peer=src, alike=(),
        )  # fmt: skip

    def all_to_all(
        self, outs: Tensors, ins: Tensors, async_op: bool = False, algorithm: str = ""
    ) -> Handle | None:
        """Set `outs[j]` of rank i to `ins[i]` of rank j: a transpose across ranks."""
        check_list("all_to_all", "outs", outs, self.rank, self.size)
        check_list("all_to_all", "ins", ins, self.rank, self.size, outs[self.rank])
        finish: Finish = []
        leaving = [self._dispatcher.stage(x, None) for x in ins]
        arriving = [self._dispatcher.stage(out, finish) for out in outs]
        return self._dispatcher.collective(
            "all_to_all", ins[0], lambda: [x.nbytes for x in ins],
            events.reduce_scatter_bus_bytes, async_op, finish,
            lambda transport, call: transport.all_to_all(arriving, leaving, call),
            nbytes=0, algorithm=algorithm, alike=(),
        )  # fmt: skip

    def all_to_all_single(
        self, out: torch.Tensor, x: torch.Tensor, async_op: bool = False, algorithm: str = ""
    ) -> Handle | None:
        """Set part i of `out` to part `rank` of rank i's `x`; both tensors have n equal parts."""
        outs, ins = (equal_parts("all_to_all_single", y, self.size) for y in (out, x))
        return self.all_to_all(outs, ins, async_op, algorithm)

    def ring_exchange(
        self, out: torch.Tensor, x: torch.Tensor, async_op: bool = False, algorithm: str = ""
    ) -> Handle | None:
        """Send `x` to the next rank; set `out`, of equal size, to the previous rank's `x`."""
        if out.numel() != x.numel() or out.dtype != x.dtype:
            raise ValueError(
                f"ring_exchange: out is {describe(out)}, but x is {describe(x)}; make them equal"
            )
        finish: Finish = []
        leaving, arriving = self._dispatcher.stage(x, None), self._dispatcher.stage(out, finish)
        return self._dispatcher.collective(
            "ring_exchange", x, lambda: [x.nbytes], _whole, async_op, finish,
            lambda transport, call: transport.ring_exchange(arriving, leaving, call),
            nbytes=x.nbytes, algorithm=algorithm,
        )  # fmt: skip

    def barrier(self, algorithm: str = "") -> None:
        """Block until all ranks of the group have called this."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.own_device())
        self._dispatcher.collective(
            "barrier", empty, lambda: [0], _whole, False, [],
            lambda transport, call: transport.barrier(empty.new_zeros(1), call),
            nbytes=0, algorithm=algorithm,
        )  # fmt: skip

    def all_gather_object(self, obj: Any) -> list[Any]:
        """A list of all ranks' picklable `obj`, on all ranks. Intended for small objects: sends the
        sizes first, then the pickled bytes. Events count both."""
        with no_modes():
            flat = self._pickled(obj)
            size = torch.tensor([flat.numel()], device=flat.device)
            sizes = size.repeat(self.size)
            self.all_gather_into_tensor(sizes, size)
            # A fake process group receives nothing, so all entries become copies of `obj`.
            received = [
                flat.clone() if n == flat.numel() else flat.new_empty(n) for n in sizes.tolist()
            ]
            self.all_gather(received, flat)
            return [_unpickled(pickled) for pickled in received]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s picklable `obj`, on all ranks, sent as in `all_gather_object`."""
        with no_modes():
            flat = self._pickled(obj)
            size = torch.tensor([flat.numel()], device=flat.device)
            self.broadcast(size, src)
            if self.rank != src and int(size) != flat.numel():
                flat = flat.new_empty(int(size))
            self.broadcast(flat, src)
            return _unpickled(flat)

    def _pickled(self, obj: Any) -> torch.Tensor:
        flat = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        return flat.to(self.own_device())

    # --- point to point: the k-th receive matches the k-th send with equal ranks and tag ------

    def send(self, x: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send `x` to rank `dst`; blocks until `x` may be modified."""
        self._message(x, dst, tag, sends=True, blocking=True).wait()

    def recv(self, x: torch.Tensor, src: int, tag: int = 0) -> None:
        """Fill `x` with the next message from rank `src`; the sizes must be equal."""
        self._message(x, src, tag, sends=False, blocking=True).wait()

    def isend(self, x: torch.Tensor, dst: int, tag: int = 0) -> Handle:
        """Like `send`, but returns a handle immediately."""
        return self._message(x, dst, tag, sends=True, blocking=False)

    def irecv(self, x: torch.Tensor, src: int, tag: int = 0) -> Handle:
        """Like `recv`, but returns a handle immediately."""
        return self._message(x, src, tag, sends=False, blocking=False)

    def _message(
        self, x: torch.Tensor, peer: int, tag: int, *, sends: bool, blocking: bool
    ) -> Handle:
        check_peer(peer, tag, self.rank, self.size)
        finish: Finish = []
        flat = self._dispatcher.stage(x, None if sends else finish)

        def start(transport: Transport, call: Call) -> Work:
            return (transport.send if sends else transport.receive)(flat, peer, call)

        return self._dispatcher.message(x, peer, tag, sends, blocking, finish, start)

    def own_device(self) -> str:
        """The device type whose tensors this group sends without a copy."""
        return "cuda" if self._dispatcher.backend_of.get("cuda") == "nccl" else "cpu"


def _whole(chunk_bytes: list[int], rank: int) -> int:
    return sum(chunk_bytes)


def _unpickled(flat: torch.Tensor) -> Any:
    return pickle.loads(flat.cpu().numpy().tobytes())
