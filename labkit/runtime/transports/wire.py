"""Send and receive over a process group, the basis of all readable collectives. `PacedWire` delays
each message until a `Link` would have delivered it, so that the receiver really waits.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any, Protocol
from weakref import finalize, ref

import torch
import torch.distributed as dist

from labkit.runtime.transports.link import Link, TwoLevel


class Work(Protocol):
    """An operation in flight."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class Wire:
    """Messages in one group: contiguous tensors of any dtype. `nodes`: ranks on each machine."""

    nodes: Sequence[Sequence[int]]

    def __init__(self, group: Any):
        self._group = ref(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.nodes = nodes_of(dist.get_process_group_ranks(group))

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        """Post `x` to rank `peer` of the group; do not modify `x` before the work is done."""
        return dereferenced(self._group).send([as_bytes(x)], peer, tag)

    def irecv(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a receive into `x` of the next message from `peer` with `tag`."""
        return dereferenced(self._group).recv([as_bytes(x)], peer, tag)


class PacedWire(Wire):
    """Messages over the process's modeled link of speed `link`, or over one link per level."""

    def __init__(self, group: Any, link: Link | TwoLevel):
        super().__init__(group)
        ranks = dist.get_process_group_ranks(group)
        if isinstance(link, TwoLevel):
            self.nodes = nodes_of(ranks, link.ranks_per_node)
        own = ranks[self.rank]
        self._out: list[Outgoing] = []
        for peer in ranks:
            level, speed = link.level(own, peer), link.joining(own, peer)
            with _outgoing_lock:
                if (level, speed) not in _outgoing:
                    _outgoing[level, speed] = Outgoing(speed)
                self._out.append(_outgoing[level, speed])

    def isend(self, x: torch.Tensor, peer: int, tag: int) -> Work:
        return self._out[peer].post(x.nbytes, partial(super().isend, x, peer, tag))


class Outgoing:
    """A modeled link out of this process. It sends the messages of all groups one at a time."""

    def __init__(self, link: Link):
        self.link = link
        self._lane = Lane("labkit wire")
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self.sent_bytes = 0  # since the process began

    def post(self, nbytes: int, send: Callable[[], Work]) -> "Departing":
        with self._lock:
            self._free_at_s = max(time.monotonic(), self._free_at_s) + self.link.seconds(nbytes)
            arrives_s = self._free_at_s + self.link.latency_us * 1e-6
            self.sent_bytes += nbytes

            def deliver() -> Work:
                while (left_s := arrives_s - time.monotonic()) > 0:
                    time.sleep(left_s)
                return Posted(send())  # not awaited here: later messages must not queue behind it

            return Departing(self._lane.put(LaneWork(deliver)))


# The links of this process, by level and speed: levels of equal speed still have separate links.
_outgoing: dict[tuple[str, Link], Outgoing] = {}
_outgoing_lock = threading.Lock()


def paced_bytes(link: Link) -> int:
    """Bytes sent so far by this process over modeled links of speed `link`."""
    with _outgoing_lock:
        return sum(out.sent_bytes for (_, speed), out in _outgoing.items() if speed == link)


class Departing:
    """A message that waits for its turn on the modeled link and is then posted."""

    def __init__(self, lane_work: "LaneWork"):
        self._lane_work = lane_work

    def wait(self) -> Any:
        return self._lane_work.wait().wait()

    def is_completed(self) -> bool:
        return self._lane_work.is_completed() and self._lane_work.wait().is_completed()


class Posted:
    """A gloo message that callers may poll or drop. A thread then waits for it, because gloo's work
    completes only when waited for, and dropping the work would lose the message."""

    def __init__(self, work: Work):
        self._work: Work | None = work
        self._waiter: LaneWork | None = None

    def wait(self) -> Any:
        if self._waiter is not None:
            return self._waiter.wait()
        value = self._work.wait() if self._work is not None else None
        self._work = None
        return value

    def is_completed(self) -> bool:
        if self._work is not None and self._waiter is None:
            self._waiter = LaneWork(self._work.wait)
            threading.Thread(target=self._waiter.run, name="labkit message", daemon=True).start()
            self._waiter.wait_for(0.001)  # so that the first poll is correct, too
        return self._waiter is None or self._waiter.is_completed()

    def __del__(self) -> None:
        with suppress(RuntimeError):  # at interpreter exit, no thread can start
            self.is_completed()


class Lane:
    """A worker thread that runs asynchronous operations in order, until the lane is dropped. It is
    a daemon, so that a hung operation does not keep the process alive."""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[LaneWork | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._tasks,), name=name, daemon=True).start()
        finalize(self, self._tasks.put, None).atexit = False

    def put(self, work: "LaneWork") -> "LaneWork":
        self._tasks.put(work)
        return work


def _run(tasks: "queue.SimpleQueue[LaneWork | None]") -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # frees its tensors


class LaneWork:
    """A function to run on a lane; `wait` returns its value or raises its error."""

    def __init__(self, function: Callable[[], Any]):
        self._function: Callable[[], Any] | None = function
        self._pending = threading.Lock()  # held until done: many times cheaper than an Event
        self._pending.acquire()
        self._value: Any = None
        self._error: BaseException | None = None
        self.began_s = self.ended_s = 0.0

    def run(self) -> "LaneWork":
        assert self._function is not None
        self.began_s = time.monotonic()
        try:
            self._value = self._function()
        except BaseException as error:  # raised in `wait`
            self._error = error
        self.ended_s = time.monotonic()
        self._function = None  # frees the tensors
        self._pending.release()
        return self

    def wait_for(self, most_s: float) -> None:
        if self._pending.acquire(timeout=most_s):
            self._pending.release()

    def wait(self) -> Any:
        with self._pending:
            pass
        if self._error is not None:
            raise self._error
        return self._value

    def is_completed(self) -> bool:
        return not self._pending.locked()


def dereferenced(group: "ref[Any]") -> Any:
    """The process group, weakly referenced so that destroying the group closes its sockets."""
    process_group = group()
    if process_group is None:
        raise RuntimeError("the process group was destroyed; create a new Comm")
    return process_group


def nodes_of(global_ranks: Sequence[int], per_node: int | None = None) -> list[list[int]]:
    """The group's ranks by machine. Each machine has `per_node` global ranks, by default torchrun's
    LOCAL_WORLD_SIZE; without either, all ranks are on one machine."""
    above_all = len(global_ranks) + max(global_ranks)
    per_node = per_node or int(os.environ.get("LOCAL_WORLD_SIZE") or above_all)
    ranks = range(len(global_ranks))
    return [list(node) for _, node in groupby(ranks, lambda rank: global_ranks[rank] // per_node)]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, so that every dtype can be sent."""
    return x.detach().view(-1).view(torch.uint8)
