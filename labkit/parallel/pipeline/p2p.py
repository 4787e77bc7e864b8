"""Messages of a pipeline: sends do not block, and receives are posted ahead.

    rank 0     F0 F1 ────────── F2                  every rank knows the whole schedule: rank 1
                 ╲  ╲             ╲                 knows what rank 0 sends, and in which order;
    rank 1        F0 │ F1  B0      F2               it posts receives in that order, each before
                     └ posted before F0 runs        the preceding computation

Tensors are [rows, ...]. All ranks know the rows per micro-batch; shape, dtype and whether a
gradient returns are sent once per boundary, before the first message.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.comm import Comm, CommError, Handle
from labkit.parallel.pipeline.scatter_gather import ScatterGather
from labkit.schedules.actions import Message, Schedule, chunks_of, sent

TAGS = {"activation": 101, "gradient": 102, "meta": 103}
MAX_DIMS = 8
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class TensorMeta(NamedTuple):
    """The metadata that a stage needs before it can receive a tensor."""

    dtype: torch.dtype
    rest: tuple[int, ...]  # the shape after dim 0 (rows)
    has_gradient: bool  # whether a gradient returns

    def to_tensor(self) -> Tensor:  # [11] int64
        head = [DTYPES.index(self.dtype), int(self.has_gradient), len(self.rest)]
        return torch.tensor([*head, *self.rest, *[0] * (MAX_DIMS - len(self.rest))])

    @staticmethod
    def from_tensor(encoded: Tensor) -> "TensorMeta":
        dtype, has_gradient, dims, *rest = encoded.tolist()
        return TensorMeta(DTYPES[dtype], tuple(rest[:dims]), bool(has_gradient))

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        shape = ", ".join(["rows", *map(str, self.rest)])
        return f"{kind} [{shape}]" + ("" if self.has_gradient else " without a gradient")


class PendingSend(NamedTuple):
    """A send in progress; the tensor must not change before the send completes."""

    handle: Handle
    x: Tensor
    version: int
    what: str

    def wait(self) -> None:
        """Raises ValueError if the tensor was modified during the send."""
        self.handle.wait()
        if _version(self.x) != self.version:
            raise ValueError(
                f"{self.what} was changed in place while it was being sent to another stage, "
                "which may have received new values; return a new tensor for every micro-batch"
            )


def _version(x: Tensor) -> int:
    """The tensor's version counter, increased by every in-place write; 0 for inference tensors."""
    return 0 if x.is_inference() else x._version


class P2PChannel:
    """Sends and receives this rank's messages in `schedule`, as full tensors or as slices."""

    def __init__(self, comm: Comm, schedule: Schedule, parts: ScatterGather | None = None):
        self.comm, self._parts = comm, parts
        size, chunks = comm.size, chunks_of(schedule)
        self._orders: dict[int, list[Message]] = {}  # received from each rank, in send order
        for source, actions in enumerate(schedule):
            messages = [sent(action, source, size, chunks) for action in actions]
            own = [m for m in messages if m and m.target % size == comm.rank != source]
            self._orders[source] = own
        self._metas: dict[int, TensorMeta] = {}  # by boundary, the index of the earlier stage
        self._pending_sends: deque[PendingSend] = deque()
        self._in_step = False

    def begin(self, rows: Sequence[int], device: torch.device, changed: bool) -> None:
        """Begin a step. `changed`: whether shapes or dtypes differ from the last step. Raises
        RuntimeError if the last step failed."""
        if self._in_step:
            raise RuntimeError(
                "the last step of this pipeline failed, and its messages are still in flight; "
                "create a new Pipeline (on a new World or group)"
            )
        self._in_step, self._rows, self._device = True, rows, device
        self._expected = {source: deque(order) for source, order in self._orders.items()}
        self._posted: dict[Message, tuple[Handle, Tensor]] = {}
        self._local: dict[Message, Tensor] = {}  # from this rank to itself
        if changed:
            self._metas.clear()

    def end(self) -> None:
        while self._pending_sends:
            self._pending_sends.popleft().wait()
        self._in_step = False

    def send(self, message: Message, x: Tensor | None) -> None:
        """Start sending `x`; None means no gradient, and nothing is sent."""
        self._release_sent()
        if message.what == "activation":
            assert x is not None
            self._send_meta(message, x)
        if x is None:
            return
        x = x.detach()
        if message.target % self.comm.size == self.comm.rank:
            self._local[message] = x
        else:
            self._post_send(x, message)

    def _post_send(self, x: Tensor, message: Message) -> None:
        kind = "output" if message.what == "activation" else "gradient"
        at = f"stage {message.source} (rank {self.comm.rank}), micro-batch {message.microbatch},"
        if self._parts:
            x = self._parts.own_part(x, f"{kind} of {at}")
        self._start(x, message, message.what, f"the {kind} of {at}")

    def _release_sent(self) -> None:
        while self._pending_sends and self._pending_sends[0].handle.is_completed():
            self._pending_sends.popleft().wait()

    def _start(self, x: Tensor, message: Message, tag: str, what: str) -> None:
        version = _version(x)
        handle = self.comm.isend(x, message.target % self.comm.size, TAGS[tag])
        self._pending_sends.append(PendingSend(handle, x, version, what))

    def _send_meta(self, message: Message, x: Tensor) -> None:
        boundary, k = message.source, message.microbatch
        rows, *rest = x.shape if x.ndim else (0,)
        at = f"stage {boundary} (rank {self.comm.rank}), micro-batch {k}"
        if rows != self._rows[k] or x.ndim > MAX_DIMS + 1:
            raise ValueError(
                f"{at}: its output has shape {list(x.shape)}, but the micro-batch has "
                f"{self._rows[k]} rows; keep rows in dim 0, with at most {MAX_DIMS} dims after it"
            )
        if x.dtype not in DTYPES:
            raise ValueError(f"{at}: a pipeline cannot send {x.dtype}; cast it, e.g. to float32")
        meta = TensorMeta(x.dtype, tuple(rest), x.requires_grad)
        known = self._metas.setdefault(boundary, meta)
        if known is meta and message.target % self.comm.size != self.comm.rank:
            self._start(meta.to_tensor(), message, "meta", f"{at}: the metadata of its output")
        if known != meta:
            raise ValueError(
                f"{at}: its output is {meta}, but was {known} before; a stage's outputs must "
                "have the same shape and dtype for every micro-batch, except for the number of rows"
            )

    def has_gradient(self, boundary: int) -> bool:
        """Whether a gradient returns across `boundary`; known after the first message."""
        return boundary in self._metas and self._metas[boundary].has_gradient

    def receive(self, message: Message) -> Tensor | None:
        """Returns [rows, ...], or None for a gradient that is not needed. An activation requires
        grad if the sender's output does. Raises CommError if the message does not arrive."""
        if message.what == "gradient" and not self._metas[message.target].has_gradient:
            return None
        if message.source % self.comm.size == self.comm.rank:
            x = self._local.pop(message)
        else:
            x = self._received(message)
        if message.what == "activation" and self._metas[message.source].has_gradient:
            x.requires_grad_()
        return x

    def _received(self, message: Message) -> Tensor:
        source = message.source % self.comm.size
        try:
            while message not in self._posted:
                self._post_next(source, wanted=True)
            self._post_next(source, wanted=False)
            handle, x = self._posted.pop(message)
            handle.wait()
            if self._parts:
                self._parts.gather(x)
        except CommError as error:
            raise CommError(
                f"stage {message.target} (rank {self.comm.rank}) waited for the {message.what} of "
                f"micro-batch {message.microbatch} from stage {message.source} (rank {source}), "
                f"which did not arrive: {error}"
            ) from error
        return x

    def _post_next(self, source: int, wanted: bool) -> None:
        """Post the next receive from `source`; unless `wanted`, only if the shape is known."""
        if not self._expected[source]:
            return
        message = self._expected[source][0]
        boundary = min(message.source, message.target)
        if boundary not in self._metas:
            if not wanted:
                return
            encoded = torch.empty(3 + MAX_DIMS, dtype=torch.int64)
            self.comm.recv(encoded, source, TAGS["meta"])
            self._metas[boundary] = TensorMeta.from_tensor(encoded)
        self._expected[source].popleft()
        meta = self._metas[boundary]
        if message.what == "activation" or meta.has_gradient:
            shape = self._rows[message.microbatch], *meta.rest
            x = torch.empty(shape, dtype=meta.dtype, device=self._device)
            buffer = self._parts.own_slice(x) if self._parts else x
            self._posted[message] = self.comm.irecv(buffer, source, TAGS[message.what]), x
