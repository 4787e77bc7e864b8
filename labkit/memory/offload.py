"""Offload: activations move to host memory after forward, and return before backward.

    forward    | block 0 | block 1 | block 2 | ...      device: tensors in flight or not moved
    bus                  [ out 0 ][ out 1 ][ out 2 ]    host:   all offloaded tensors
    backward        ... | block 2 | block 1 | block 0
    bus             [ back 2 ][ back 1 ][ back 0 ]      last out, first back

    device memory   at most 2·in_flight offloaded tensors, instead of all of them
    transfers       each saved byte moves out and back once; hidden if compute takes longer

Autograd calls a hook for each tensor that it saves, and keeps what the hook returns: a `Ticket`.
Before backward uses the tensor, a second hook must return it. Parameters and small tensors stay;
memory saved by several ops (the shared input of q, k and v) moves once.

Source: torch, "Hooks for autograd saved tensors"; for checkpoints, Rajbhandari et al., "ZeRO",
arXiv 1910.02054, section 5.1 (P_a+cpu); Rhu et al., "vDNN", arXiv 1602.08124, section 3.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from labkit.comm import Link
from labkit.memory.buffers import ConstantBuffer
from labkit.memory.bus import Arrival, Bus, StreamBus, bus_for


def offload_activations(
    model: nn.Module,
    *,
    link: Link | None = None,
    smallest_bytes: int = 2**16,
    in_flight: int = 2,
    host_bytes: int = 2**28,
    bus: Bus | StreamBus | None = None,
) -> "Offload":
    """A reusable context that moves tensors saved by autograd to host memory.

    Args:
        model: its parameters stay; only tensors on its device move.
        link: on a CPU, the speed of the simulated bus; None: memory speed.
        smallest_bytes: smaller tensors stay.
        in_flight: the most tensors in flight per direction; at this limit, forward waits.
        host_bytes: size of the host block, allocated once; tensors that do not fit stay.
        bus: used in place of the device's bus.

    >>> with (offload := offload_activations(model)):
    ...     value = loss(model(x))
    >>> value.backward()  # same gradients as without offload

    Raises ValueError for invalid arguments; in backward, RuntimeError if a saved tensor was changed
    in place while in flight or on the device."""
    return Offload(model, link, smallest_bytes, in_flight, host_bytes, bus)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Saved by autograd in place of a tensor; describes the tensor's storage and view."""

    moved: "HostCopy"
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool  # conj, neg: lazy bits of a complex view
    neg: bool


class Offload:
    """See `offload_activations`. `moved_bytes` were offloaded; `no_room_bytes` did not fit."""

    def __init__(
        self, model: nn.Module, link: Link | None, smallest_bytes: int, in_flight: int,
        host_bytes: int, bus: Bus | StreamBus | None,
    ):  # fmt: skip
        if in_flight < 1 or smallest_bytes < 0:
            raise ValueError(
                f"in_flight={in_flight}, smallest_bytes={smallest_bytes}: allow at least one "
                "tensor in flight, and no negative size"
            )
        self._model = model
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.bus = bus or bus_for(self._device, link)
        self.host = ConstantBuffer(host_bytes, pinned=self._device.type == "cuda")
        self.moved_bytes = self.no_room_bytes = 0
        self._smallest_bytes, self._in_flight = smallest_bytes, in_flight
        self._stay: set[int] = set()  # storages of parameters
        self._of = weakref.WeakKeyDictionary[Any, weakref.ref[HostCopy]]()
        self._by_number: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()
        self._leaving: deque[weakref.ref[HostCopy]] = deque()  # weak: the graph may be freed first
        self._count = 0
        self._hooks: list[Any] = []

    @property
    def leaving_bytes(self) -> int:
        """Bytes still on the device, in flight to the host."""
        under_way = (moved() for moved in self._leaving)
        return sum(moved.nbytes for moved in under_way if moved is not None and moved.is_leaving)

    def __enter__(self) -> "Offload":
        self._stay = {p.untyped_storage()._cdata for p in self._model.parameters()}
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.pop().__exit__(*error)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self:
            return forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offload":
        return self  # a copied model shares the bus and the host memory

    # --- forward: autograd saves a tensor ---

    def _pack(self, x: torch.Tensor) -> "tuple[torch.Tensor, int] | Ticket":
        moved = self._moved(x) if self._may_leave(x) else None
        if moved is None:  # detached: a saved output would keep its graph alive
            return x.detach(), x._version
        moved.tickets += 1
        offset = int(x.storage_offset())
        return Ticket(moved, x.dtype, x.shape, x.stride(), offset, x.is_conj(), x.is_neg())

    def _may_leave(self, x: torch.Tensor) -> bool:
        if x.device != self._device or x.layout is not torch.strided:
            return False
        storage = x.untyped_storage()
        smallest_bytes = max(1, self._smallest_bytes)  # empty tensors stay
        return storage.nbytes() >= smallest_bytes and storage._cdata not in self._stay

    def _moved(self, x: torch.Tensor) -> "HostCopy | None":
        """The host copy of the storage of `x`, new or from an earlier tensor; None if too large."""
        storage = x.untyped_storage()
        known = self._of[storage]() if storage in self._of else None
        if known is not None and known.version == x._version:
            return known
        while len(self._leaving) >= self._in_flight:
            if (first := self._leaving.popleft()()) is not None:
                first.leave()
        host = self.host.take(storage.nbytes())
        if host is None:
            self.no_room_bytes += storage.nbytes()
            return None
        moved = HostCopy(self._count, x, host, self.bus, self.host)
        self._count += 1
        self.moved_bytes += storage.nbytes()
        self._of[storage] = weakref.ref(moved)
        self._by_number[moved.number] = moved
        self._leaving.append(self._of[storage])
        return moved

    # --- backward: autograd needs the tensor ---

    def _unpack(self, kept: "tuple[torch.Tensor, int] | Ticket") -> torch.Tensor:
        if not isinstance(kept, Ticket):
            x, version = kept
            if x._version != version:
                raise _changed()
            return x
        moved = kept.moved
        moved.fetch()
        for number in range(moved.number - 1, moved.number - 1 - self._in_flight, -1):
            if (earlier := self._by_number.get(number)) is not None:
                earlier.fetch()
        flat = moved.use()
        x = torch.empty(0, dtype=kept.dtype, device=flat.device)
        x.set_(flat.untyped_storage(), kept.offset, kept.shape, kept.stride)
        x = torch._conj(x) if kept.conj else x
        return torch._neg_view(x) if kept.neg else x


class HostCopy:
    """One offloaded storage; lives until autograd has freed its last ticket.

    here ── copy ──> leaving ── leave ──> away ── fetch ──> coming ── use ──> here
    """

    def __init__(
        self, number: int, x: torch.Tensor, host: torch.Tensor, bus: Bus | StreamBus,
        buffer: ConstantBuffer,
    ):  # fmt: skip
        self.number, self.version = number, x._version
        self.tickets = 0  # saved tensors that share this storage
        self._used = 0  # tickets that backward has used
        self._seen: torch.Tensor | None = x.detach()  # detects in-place changes
        self._changed = False
        self._host, self._bus, self._buffer = host, bus, buffer  # `host`: a slice of `buffer`
        self._device = x.device
        empty = torch.empty(0, dtype=torch.uint8, device=x.device)
        self._here: torch.Tensor | None = empty.set_(x.untyped_storage())  # flat bytes
        self._trip: Arrival = bus.copy(host, self._here)

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    @property
    def is_leaving(self) -> bool:
        return self._seen is not None

    def leave(self) -> None:
        assert self._seen is not None, "leave() is called once"
        self._trip.wait()
        self._changed = self._seen._version != self.version
        self._here = self._seen = None

    def fetch(self) -> None:
        if self._here is None:
            self._here = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
            self._trip = self._bus.copy(self._here, self._host)

    def use(self) -> torch.Tensor:
        """Return the bytes on the device, and drop them after the last use of a ticket."""
        flat = self._here
        assert flat is not None, "fetch() precedes use()"
        if self._seen is None:
            self._trip.wait()
        if self._changed or (self._seen is not None and self._seen._version != self.version):
            raise _changed()
        self._used += 1
        if self._used == self.tickets:  # another backward fetches the bytes again
            self._used = 0
            if self._seen is None:
                self._here = None
        return flat

    def __del__(self) -> None:
        self._buffer.give_back(self._host)  # safe in flight: copies run in order


def _changed() -> RuntimeError:
    return RuntimeError(
        "a tensor that backward needs was changed in place after it had been saved; use the "
        "out-of-place operation (x = x + y, not x += y)"
    )
