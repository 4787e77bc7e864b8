"""Runs a communicator's operations; each is numbered, compared between ranks and recorded."""

import hashlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from labkit.comm.handle import CommError, Handle
from labkit.comm.validation import COLLECTIVE_TAGS, check_tensor, describe
from labkit.events import CommEvent
from labkit.runtime.board import IN_FLIGHT, WAITED_FOR, CollectiveMismatch, Note
from labkit.runtime.clock import HOST_CLOCK, Clock
from labkit.runtime.process_context import caller, here
from labkit.runtime.transports.native import Native, Nothing
from labkit.runtime.transports.send_receive import SendReceive
from labkit.runtime.transports.shm import Shared
from labkit.runtime.transports.transport import Call, Kind, Transport
from labkit.runtime.transports.wire import PacedWire, Wire, Work, dereferenced

Made = TypeVar("Made")
OWN_ERRORS = CommError, CollectiveMismatch, NotImplementedError  # raised with complete messages
BusBytes = Callable[[list[int], int], int]  # (chunk bytes per rank, rank) -> bytes


class Dispatcher:
    """The sequence numbers and transports that all `Comm`s of one process group share."""

    worlds = 0  # default groups so far in this process: torch gives all of them the same name

    def __init__(self, group: Any):
        self._group = ref(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        members = ", ".join(map(str, self.ranks[:8])) + (" ..." if len(self.ranks) > 8 else "")
        is_default = group is dist.group.WORLD
        Dispatcher.worlds += is_default
        self.name = "default" if is_default else f"{group.group_name} (ranks {members})"
        if Dispatcher.worlds > 1:
            self.name += f" of world {Dispatcher.worlds}"
        config = str(dist.get_backend_config(group))
        self.backend_of = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
        self._collectives = count(1)
        self._messages = defaultdict[tuple[int, int, int], Iterator[int]](partial(count, 1))
        self._transports: dict[tuple[torch.device, object], Transport] = {}
        self._shared: dict[tuple[tuple[int, ...], timedelta | None], Any] = {}  # reusable groups
        self.users: WeakSet[object] = WeakSet()  # the group's Comms, and handles in flight
        self._subgroups: dict[Dispatcher, bool] = {}  # subgroup -> whether this rank dropped it
        self.calls: deque[str] = deque(maxlen=1000)  # collectives called without a board

    @staticmethod
    def of(group: Any) -> "Dispatcher":
        """The dispatcher of a process group, created on first use."""
        with _making:
            for made in (dist.group.WORLD, group):  # WORLD first: subgroup names contain its number
                if made not in _dispatchers:
                    _dispatchers[made] = Dispatcher(made)
            return _dispatchers[group]

    def collective(
        self,
        what: str,
        x: torch.Tensor,
        chunk_bytes: Callable[[], list[int]],
        bus: BusBytes,
        async_op: bool,
        finish: list[Callable[[], object]],
        start: Callable[[Transport, Call], Work],
        *,
        nbytes: int,
        reduction: str = "",
        algorithm: str = "",
        peer: int | None = None,
        alike: Sequence[torch.Tensor] | None = None,
    ) -> Handle | None:
        """Run one collective: `start(transport, call)` returns the work. All ranks must pass the
        same `nbytes`, which determines the algorithm, and tensors of the same shapes in `alike`
        (default: `x`)."""
        collective, kind = what.partition("(")[0], Kind(x.dtype, reduction)
        transport, name = self.transport(x).choose(collective, nbytes, kind, algorithm)
        seq = next(self._collectives)
        call = Call(COLLECTIVE_TAGS + seq % COLLECTIVE_TAGS, async_op, name)
        if here.board is None:
            self.calls.append(what)

        def note() -> Note:
            by = f" by {name}" if algorithm or collective in transport.forced else ""
            shapes = [list(tensor.shape) for tensor in ((x,) if alike is None else alike)]
            return Note(
                self.name, self.ranks, seq, f"{what} {describe(x)}{by}", caller(),
                f"{what} {x.dtype} {shapes} {name}",
            )  # fmt: skip

        def traffic() -> tuple[int, int]:
            chunks = chunk_bytes()
            return sum(chunks), bus(chunks, self.rank)

        handle = self._carry(what, x, transport, call, start, finish, note, traffic, peer)
        if async_op:
            self.users.add(handle)
            return handle
        handle.wait()
        return None

    def message(
        self,
        x: torch.Tensor,
        peer: int,
        tag: int,
        sends: bool,
        blocking: bool,
        finish: list[Callable[[], object]],
        start: Callable[[Transport, Call], Work],
    ) -> Handle:
        """Run one send to, or one receive from, rank `peer`."""
        transport, call = self.transport(x), Call(tag, not blocking, "")
        ends = (self.rank, peer) if sends else (peer, self.rank)
        seq = next(self._messages[*ends, tag])

        def note() -> Note:
            source, target = (self.ranks[end] for end in ends)
            what = f"send(to {target})" if sends else f"recv(from {source})"
            return Note(
                f"{self.name} {source}->{target} tag {tag}", (source, target), seq,
                f"{what} {describe(x)}", caller(), describe(x), collective=False,
            )  # fmt: skip

        def traffic() -> tuple[int, int]:
            return x.nbytes, x.nbytes if sends else 0

        op = "send" if sends else "recv"
        handle = self._carry(op, x, transport, call, start, finish, note, traffic, peer)
        self.users.add(handle)
        return handle

    def compare(self, what: str, value: Callable[[], str]) -> None:
        """Raises CollectiveMismatch if `value()` differs between ranks."""
        seq = next(self._collectives)  # even without a board, so that sequence numbers agree
        if here.board is not None:
            with here.carrying():  # this is not part of the program
                text = f"{what} {value()}"
            note = Note(self.name, self.ranks, seq, text, caller(), text)
            here.board.enter(note)
            here.board.leave(note)

    def symmetric_empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        if like.device.type != "cpu" or self.size == 1:
            return torch.empty(numel, dtype=like.dtype, device=like.device)
        transport, what = self.transport(like), f"symmetric_empty({numel}, {like.dtype})"
        return self._make_collectively(what, lambda: transport.symmetric_empty(numel, like.dtype))

    def stage(self, x: torch.Tensor, finish: list[Callable[[], object]] | None) -> torch.Tensor:
        """`x` as a flat contiguous tensor that the transport can access. If that is a copy and `x`
        is an output (`finish` is not None), append to `finish` a function that copies it back."""
        check_tensor(x)
        if x.layout is not torch.strided:
            raise ValueError(f"a tensor of layout {x.layout} cannot be sent; pass x.to_dense()")
        if "fake" in self.backend_of.values() and x.is_contiguous():
            return x  # never read in a dry run, where a view would take 0.1 ms
        flat = x.detach() if x.requires_grad else x
        via_host = flat.is_cuda and self.backend_of.get("cuda") == "gloo"
        if flat.is_contiguous() and not (via_host or flat.is_conj() or flat.is_neg()):
            return _flattened(flat)
        if finish is not None and any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride())):
            raise ValueError(
                f"an expanded tensor (shape {list(x.shape)}, strides {list(x.stride())}) shares "
                "memory between elements and cannot be written; pass x.contiguous()"
            )
        with here.carrying():
            host = flat.cpu() if via_host else flat
            copy = _flattened(host.resolve_conj().resolve_neg().contiguous())
        if finish is not None:
            finish.append(lambda: flat.copy_(copy.view(flat.shape)))
        return copy

    def new_group(self, ranks: Sequence[int], shared: bool) -> Any:
        """A group of these global ranks, created by all ranks together, or reused if `shared`."""
        key = tuple(ranks), self._timeout()

        def make() -> Any:
            if shared and key in self._shared:
                return self._shared[key]
            self.destroy_dropped()
            made = dist.new_group(ranks, timeout=key[1])
            if shared:
                self._shared[key] = made
            elif made != dist.GroupMember.NON_GROUP_MEMBER and dist.get_backend(made) == "gloo":
                self._subgroups[Dispatcher.of(made)] = False
            return made

        return self._make_collectively(f"subgroup({list(ranks)})", make)

    def destroy_dropped(self) -> None:
        """Destroy gloo subgroups that all of their ranks have dropped, as counted in the store."""
        unused = [group for group in self._subgroups if not group.users and group._group()]
        for subgroup in unused:
            store = dist.distributed_c10d._get_default_store()
            dropped = store.add(f"labkit dropped {subgroup.name}", 1 - self._subgroups[subgroup])
            self._subgroups[subgroup] = True
            if dropped == subgroup.size:
                del self._subgroups[subgroup]
                dist.destroy_process_group(dereferenced(subgroup._group))

    def _make_collectively(self, what: str, make: Callable[[], Made]) -> Made:
        """Call `make`. The board records it like a collective: the ranks may disagree or block."""
        note = Note(self.name, self.ranks, next(self._collectives), what, caller(), what)
        if here.board:
            here.board.enter(note, WAITED_FOR)
        made = make()
        if here.board:
            here.board.leave(note)
        return made

    def _timeout(self) -> timedelta | None:
        """The group's timeout; None (torch's default, half an hour) if it is unknown."""
        device = torch.device(next(iter(self.backend_of)))
        try:
            options = dereferenced(self._group)._get_backend(device).options
            return options._timeout
        except (AttributeError, RuntimeError):
            return None

    def _carry(
        self,
        what: str,
        x: torch.Tensor,
        transport: Transport,
        call: Call,
        start: Callable[[Transport, Call], Work],
        finish: list[Callable[[], object]],
        make_note: Callable[[], Note],
        traffic: Callable[[], tuple[int, int]],
        peer: int | None,
    ) -> Handle:
        """Start an operation: record it on the board, notify listeners, start the transport."""
        board, note, event = here.board, None, None
        described = what
        if board or here.listeners:
            note = make_note()
            described = note.what
        if note and here.listeners:
            payload_bytes, bus_bytes = traffic()
            event = CommEvent(
                op=what.partition("(")[0], group=self.name, ranks=self.ranks, rank=self.rank,
                seq=note.seq, dtype=str(x.dtype).removeprefix("torch."), shape=tuple(x.shape),
                payload_bytes=payload_bytes, bus_bytes=bus_bytes, blocking=not call.asynchronous,
                source=note.source, peer=peer, tag=0 if note.collective else call.tag,
                transport=transport.name, algorithm=call.algorithm,
            )  # fmt: skip
            clock = self._clock(x.device)
            clock.mark(event, "issued_s", "began_s", "wait_began_s")  # the last two may change
        if board and note:
            board.enter(note, IN_FLIGHT if call.asynchronous else WAITED_FOR)
        if event:
            for listener in here.listeners:
                listener(event)
        try:
            work = start(transport, call)
        except BaseException as error:
            if board and note:
                board.leave(note, failed=True)
            if isinstance(error, RuntimeError) and not isinstance(error, OWN_ERRORS):
                raise CommError.of(described, error) from error
            raise
        clock = self._clock(x.device) if event else HOST_CLOCK
        return Handle(work, described, finish, event, board, note, clock)

    def _clock(self, device: torch.device) -> Clock:
        """The clock for waits: NCCL waits on a stream, gloo blocks the host."""
        return here.clock if self.backend_of.get(device.type) == "nccl" else HOST_CLOCK

    def transport(self, x: torch.Tensor) -> Transport:
        key = (x.device, here.link)
        if key not in self._transports:
            with _making:  # one transport for all threads
                if key not in self._transports:
                    self._transports[key] = self._new_transport(x.device.type)
        return self._transports[key]

    def _new_transport(self, device: str) -> Transport:
        backend = self.backend_of.get(device)
        if "fake" in self.backend_of.values():
            return Nothing()
        if backend is None:
            raise ValueError(
                f"group {self.name} cannot move {device} tensors: it has backends only for "
                f"{', '.join(self.backend_of)}; move the tensor to one of these devices"
            )
        group = dereferenced(self._group)
        if here.link is not None:
            return SendReceive(PacedWire(group, here.link))
        native = Native(group, backend)
        messages = SendReceive(Wire(group), native) if backend == "gloo" else native
        if here.shared is not None and device == "cpu":
            # A name unique to this group and equal on all its ranks.
            file = hashlib.sha256(f"{self.name} {self.ranks}".encode()).hexdigest()[:16]
            timeout_s = (self._timeout() or dist.default_pg_timeout).total_seconds()
            return Shared(here.shared / file, self.rank, self.size, timeout_s, messages)
        return messages


_dispatchers: WeakKeyDictionary[Any, Dispatcher] = WeakKeyDictionary()
_making = threading.Lock()


def _flattened(x: torch.Tensor) -> torch.Tensor:
    """Contiguous `x` in one dimension of stride 1; for one element, `view(-1)` may differ."""
    return x if x.stride() == (1,) else x.as_strided((x.numel(),), (1,))
