"""How a call through the door is carried out, once for all operations of a process group:
number it, compare it with the other ranks' on the board, record it, and hand it to the back that
moves the bytes of its device.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from labkit.comm.backs import Back, Call, Native, Nothing, SendReceive
from labkit.comm.board import Note
from labkit.comm.handle import Handle
from labkit.comm.surroundings import caller, here
from labkit.comm.wire import PacedWire, Wire, Work
from labkit.events import CommEvent

COLLECTIVE_TAGS = 1 << 20  # users' own messages have tags below
BusBytes = Callable[[list[int], int], int]  # (bytes of each rank's chunk, rank) -> bytes


class Carrier:
    """What all `Comm`s of one process group share: its numbering and its backs."""

    def __init__(self, group: Any):
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        members = ", ".join(map(str, self.ranks[:8])) + (" ..." if len(self.ranks) > 8 else "")
        is_default = group is dist.group.WORLD
        self.name = "default" if is_default else f"{group.group_name} (ranks {members})"
        config = str(dist.get_backend_config(group))
        self.backend_of = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
        self._collectives = 0
        self._messages: Counter[tuple[int, int, int]] = Counter()
        self._backs: dict[tuple[str, object], Back] = {}

    @staticmethod
    def of(group: Any) -> "Carrier":
        if group not in _carriers:
            _carriers[group] = Carrier(group)
        return _carriers[group]

    def collective(
        self,
        what: str,
        x: torch.Tensor,
        chunk_bytes: Callable[[], list[int]],
        bus: BusBytes,
        async_op: bool,
        finish: list[Callable[[], object]],
        start: Callable[[Back, Call], Work],
        *,
        peer: int | None = None,
        same_shape: bool = True,
    ) -> Handle | None:
        """Carry out one collective: `start` gets the back and the call and returns its work."""
        self._collectives += 1
        seq = self._collectives
        call = Call(COLLECTIVE_TAGS + seq % COLLECTIVE_TAGS, async_op)
        if here.board is None and not here.listeners:
            handle = Handle(start(self._back(x), call), what, finish)
        else:
            note = Note(
                self.name, self.ranks, seq, f"{what} {describe(x)}", caller(),
                f"{what} {describe(x) if same_shape else x.dtype}",
            )  # fmt: skip
            event = None
            if here.listeners:
                chunks = chunk_bytes()
                event = self._event(what, x, note, sum(chunks), bus(chunks, self.rank), peer)
                event.blocking = not async_op
            handle = self._noted(note, event, async_op, lambda: start(self._back(x), call), finish)
        if async_op:
            return handle
        handle.wait()
        return None

    def message(
        self,
        op: str,
        x: torch.Tensor,
        ends: tuple[int, int],  # (from, to), ranks in the group
        tag: int,
        finish: list[Callable[[], object]],
        start: Callable[[Back], Work],
    ) -> Handle:
        """Carry out one send or receive."""
        self._messages[*ends, tag] += 1
        if here.board is None and not here.listeners:
            return Handle(start(self._back(x)), op, finish)
        source, target = self.ranks[ends[0]], self.ranks[ends[1]]
        note = Note(
            f"{self.name} {source}->{target} tag {tag}", (source, target),
            self._messages[*ends, tag],
            f"{op}({'to' if op == 'send' else 'from'} {target if op == 'send' else source}) "
            f"{describe(x)}",
            caller(), describe(x), collective=False,
        )  # fmt: skip
        event = None
        if here.listeners:
            peer = ends[1] if op == "send" else ends[0]
            bus_bytes = x.nbytes if op == "send" else 0
            event = self._event(op, x, note, x.nbytes, bus_bytes, peer, tag)
        return self._noted(note, event, True, lambda: start(self._back(x)), finish)

    def stage(self, x: torch.Tensor, finish: list[Callable[[], object]] | None) -> torch.Tensor:
        """`x` as a flat contiguous tensor in memory that the back can reach. Where that is a copy
        and `x` is to be written (`finish` is given), `finish` gets the way back."""
        flat = x.detach()
        if flat.is_cuda and self.backend_of.get("cuda") == "gloo":
            flat = flat.cpu()
        flat = flat.contiguous().view(-1)
        if finish is not None and flat.data_ptr() != x.data_ptr():
            finish.append(lambda: x.detach().copy_(flat.view(x.shape)))
        return flat

    def _noted(
        self,
        note: Note,
        event: CommEvent | None,
        asynchronous: bool,
        start: Callable[[], Work],
        finish: list[Callable[[], object]],
    ) -> Handle:
        board, slot = here.board, 0
        if board:
            slot = board.enter(note)
            if not asynchronous:
                board.wait(slot)
        for listener in here.listeners if event else ():
            listener.append(event)  # type: ignore[arg-type]
        return Handle(start(), note.what, finish, event, board, slot)

    def _event(
        self, op: str, x: torch.Tensor, note: Note, payload_bytes: int, bus_bytes: int,
        peer: int | None, tag: int = 0,
    ) -> CommEvent:  # fmt: skip
        return CommEvent(
            op=op.split("(")[0], group=note.group, ranks=self.ranks, rank=self.rank, seq=note.seq,
            dtype=str(x.dtype).removeprefix("torch."), shape=tuple(x.shape),
            payload_bytes=payload_bytes, bus_bytes=bus_bytes, blocking=False, source=note.source,
            peer=peer, tag=tag, issued_s=time.monotonic(),
        )  # fmt: skip

    def _back(self, x: torch.Tensor) -> Back:
        key = (x.device.type, here.link)
        if key not in self._backs:
            self._backs[key] = self._new_back(x.device.type)
        return self._backs[key]

    def _new_back(self, device: str) -> Back:
        backend = self.backend_of.get(device)
        if backend == "fake":
            return Nothing()
        if backend is None:
            raise ValueError(
                f"group {self.name} cannot move {device} tensors: its backends are "
                f"{self.backend_of}; move the tensor first"
            )
        if here.link is not None:
            return SendReceive(PacedWire(self.group, here.link))
        return SendReceive(Wire(self.group)) if backend == "gloo" else Native(self.group)


_carriers: WeakKeyDictionary[Any, Carrier] = WeakKeyDictionary()


def describe(x: torch.Tensor) -> str:
    """ "float32 [4, 8]"."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def equal_parts(what: str, whole: torch.Tensor, n: int) -> Sequence[torch.Tensor]:
    """`whole` cut into n equal flat views. Raises ValueError where that cannot be."""
    if whole.numel() % n or not whole.is_contiguous():
        problem = "is not contiguous" if whole.numel() % n == 0 else f"does not divide by {n} ranks"
        raise ValueError(
            f"{what}: a tensor of shape {list(whole.shape)} {problem}; pad it, or use the variant "
            "that takes a list of tensors"
        )
    return whole.detach().view(-1).split(max(1, whole.numel() // n)) if whole.numel() else [
        whole.detach().view(-1)
    ] * n  # fmt: skip
