"""A bus between two memories, and an engine that copies while the program continues.

    CPU memory  ══════ bus (PCIe) ══════  device memory

    program   copy ┐    computes ...     ┌ wait      B bytes arrive after
    engine         └ latency ┬ B / rate ─┘               latency + B / rate

`StreamBus` is a GPU's real bus. `Bus` needs no GPU: it copies bytes within CPU memory, delivering
each chunk no sooner than a bus of the given rate would; its events are labeled "paced". Copies run
in order.

Rates: PCIe 4.0 carries 16 Gbit/s per lane and direction (PCI-SIG, base specification), so 16 lanes
carry 252 Gbit/s after 128b/130b encoding. PCIe 5.0 is twice as fast: 504 Gbit/s.
"""

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import Any

import torch
from torch import Tensor

from labkit.events import CommEvent
from labkit.runtime.clock import HOST_CLOCK, Clock, StreamClock
from labkit.runtime.transports.link import Link

CHUNKS = 16  # per paced copy: an early read sees partial data, as on a real bus
MAX_EVENTS = 1024  # the number of latest copies whose events a bus keeps


def bus_for(device: torch.device, link: Link | None = None) -> "Bus | StreamBus":
    """The bus of a device, paced by `link` on a CPU. Raises ValueError for a link on a GPU."""
    if device.type != "cuda":
        return Bus(link.gbps, link.latency_us) if link else Bus()
    if link is not None:
        raise ValueError(
            f"link={link}: the speed of the real bus of {device} cannot be set; omit `link`"
        )
    return StreamBus(device)


class Arrival:
    """A copy in flight. `event` records when the copy is issued, begins, ends and is awaited."""

    def __init__(self, op: str, number: int, nbytes: int, clock: Clock, transport: str):
        self.event = CommEvent(
            op, "bus", (0,), 0, number, "uint8", (nbytes,), nbytes, nbytes, False,
            transport=transport, wire_bytes=nbytes, issued_s=time.monotonic(),
        )  # fmt: skip
        self.clock = clock

    def wait(self) -> None:
        """Block the CPU, or a GPU's current stream, until the copy has arrived."""
        self.clock.mark(self.event, "wait_began_s")
        self._wait()
        self.clock.mark(self.event, "wait_ended_s")

    def done(self) -> bool:
        raise NotImplementedError

    def _wait(self) -> None:
        raise NotImplementedError


class Bus:
    """A paced bus: `gbps` gigabits (1e9 bits) per second, `latency_us` microseconds per copy.

    >>> bus = Bus(gbps=16)  # 2 GB/s
    >>> arrival = bus.copy(target, source)  # returns at once
    >>> arrival.wait()
    """

    device = torch.device("cpu")
    clock: Clock = HOST_CLOCK

    def __init__(self, gbps: float = inf, latency_us: float = 0.0):
        self.link = Link(gbps, latency_us)
        self.moved_bytes = 0  # of all copies and reads so far
        self.events: deque[CommEvent] = deque(maxlen=MAX_EVENTS)
        self._number = 0
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="labkit-bus")

    def seconds(self, nbytes: int) -> float:
        return self.link.latency_us * 1e-6 + self.link.seconds(nbytes)

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        """Issue a copy between contiguous tensors of equal shape and dtype; otherwise, raise
        ValueError. Until the copy arrives, `target` is incomplete; write to neither tensor."""
        check_alike(target, source)
        return self._issue("load", source.nbytes, [target.view(-1), source.detach().view(-1)])

    def read(self, nbytes: int) -> Arrival:
        """Issue a read without a target, like a kernel that reads host memory as it computes."""
        return self._issue("read", nbytes, [None, None])  # adds to `moved_bytes`

    def _issue(self, op: str, nbytes: int, ends: list[Any]) -> "_Paced":
        arrival = _Paced(op, self._number, nbytes, self.clock, "paced")
        self._number, self.moved_bytes = self._number + 1, self.moved_bytes + nbytes
        self.events.append(arrival.event)
        arrival.future = self._engine.submit(self._carry, arrival.event, ends)
        return arrival

    @torch.inference_mode()
    def _carry(self, event: CommEvent, ends: list[Any]) -> None:
        target, source = ends
        ends.clear()  # else the engine would keep the tensors alive after the copy
        event.began_s = time.monotonic()
        if target is None or source is None:
            sleep_until(event.began_s + self.seconds(event.payload_bytes))
        else:
            copied_bytes = 0
            for out, chunk in zip(target.tensor_split(CHUNKS), source.tensor_split(CHUNKS)):
                copied_bytes += chunk.nbytes
                sleep_until(event.began_s + self.seconds(copied_bytes))
                out.copy_(chunk)
        event.ended_s = time.monotonic()


class _Paced(Arrival):
    future: "Future[None] | None"  # None: the copy failed, and the error was reported

    def done(self) -> bool:
        return self.future is None or self.future.done()

    def _wait(self) -> None:
        if self.future is None:
            raise RuntimeError("this copy failed, as an earlier wait() reported; issue it again")
        try:
            self.future.result()  # raises the copy's error
        except Exception:
            self.future = None  # else the error's traceback keeps the future alive
            raise


class StreamBus:
    """A GPU's bus. Copies run on a separate stream, alongside compute. `copy` raises ValueError for
    CPU memory that is not pinned: a copy of pageable memory would block the program."""

    def __init__(self, device: torch.device | str = "cuda"):
        self.device = torch.device(device)
        with torch.cuda.device(self.device):
            self.stream = torch.cuda.Stream()
            self.clock = StreamClock()
        self.moved_bytes = 0
        self.events: deque[CommEvent] = deque(maxlen=MAX_EVENTS)  # `clock.settle` sets their times
        self._number = 0

    def copy(self, target: Tensor, source: Tensor) -> Arrival:
        """Issue a copy like `Bus.copy`; it begins after all work queued on the current stream."""
        check_alike(target, source)
        for x, name in ((source, "source"), (target, "target")):
            if x.device.type == "cpu" and not x.is_pinned():
                raise ValueError(
                    f"the {name} is in pageable memory, which cannot be copied "
                    "asynchronously; create it with torch.empty(..., pin_memory=True), or call "
                    "x.pin_memory()"
                )
        if self._number % MAX_EVENTS == 0:
            self.clock.settle(0.0)  # else the clock would keep the CUDA events of all copies
        arrival = _OnStream(
            (target, source), self.stream.device, "load", self._number, source.nbytes, self.clock,
            "cuda",
        )  # fmt: skip
        self._number, self.moved_bytes = self._number + 1, self.moved_bytes + source.nbytes
        self.events.append(arrival.event)
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), torch.inference_mode():
                self.clock.mark(arrival.event, "began_s")
                target.copy_(source, non_blocking=True)
                self.clock.mark(arrival.event, "ended_s")
                arrival.arrived.record()
        return arrival


class _OnStream(Arrival):
    """Keeps both tensors alive until a stream waits: only later work may reuse their memory."""

    def __init__(self, ends: tuple[Tensor, ...], device: torch.device, *args: Any):
        self.ends, self.device = ends, device
        super().__init__(*args)
        self.arrived = torch.cuda.Event()

    def done(self) -> bool:
        return self.arrived.query()

    def _wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.arrived)
        self.ends = ()

    def __del__(self) -> None:
        if self.ends:  # never waited for
            self._wait()


def check_alike(target: Tensor, source: Tensor) -> None:
    """Raises ValueError if shapes or dtypes differ, or a tensor is not contiguous."""
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        raise ValueError(
            f"a bus copies bytes unchanged, but the source is {source.dtype} {list(source.shape)} "
            f"and the target {target.dtype} {list(target.shape)}; cast before or after the copy"
        )
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError("a bus copies contiguous tensors; call x.contiguous() first")


def sleep_until(when_s: float) -> None:
    """Sleep until the monotonic clock reads `when_s`, or until the program ends."""
    while (left_s := when_s - time.monotonic()) > 0 and not _ENDING.is_set():
        time.sleep(min(left_s, 1.0))


# On exit, Python joins executor threads; pending copies then run without pacing. (With a daemon
# thread instead, the process would abort if the thread is inside torch at exit.)
_ENDING = threading.Event()
threading._register_atexit(_ENDING.set)  # type: ignore[attr-defined]
