"""Asynchronous parameter server: workers push and pull independently. Gradients may be *stale*:
computed with weights that other workers have since updated.

    rank 0, the server  parameters P, optimizer state, a buffer for one set of gradients G
    n-1 workers         parameters P, gradients G, and separate data per worker
    bytes per step      G from a worker to the server and G back (the trainable weights)

        rank 1  [ w0: forward backward ]push [ w1 .................... ]push
        rank 2  [ w0: forward backward ..........  ]push [ w3: forward ...
        rank 3  [ w0: forward backward ...... ]push [ w2: ...
        rank 0                         step -> w1    w2  w3

    staleness of an update = version before the update - version used to compute the gradient:
    0 for rank 1 above, 1 for rank 3 (computed with w0, applied to w1), 2 for rank 2

With `max_staleness=s` (*stale synchronous parallel*), a worker waits while it is more than s steps
ahead of the slowest worker; staleness is then at most (n-2)(2s + 1) on n ranks.

Sources: Dean et al. (DistBelief), NIPS 2012, section 4.1; Li et al., "Scaling Distributed Machine
Learning with the Parameter Server", OSDI 2014, section 3; Ho et al., "More Effective Distributed ML
via a Stale Synchronous Parallel Parameter Server", NIPS 2013, section 2.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm, Handle
from labkit.parallel.common.data_parallel import Replica
from labkit.parallel.common.flat import check_dense
from labkit.parallel.common.ownership import broadcast_tensors
from labkit.parallel.parameter_server.synchronous import SERVER

DONE = -1  # sent by a finished worker in place of a version
POLL_S = 0.0002


@dataclass(frozen=True)
class Update:
    """A server step: gradients of weight version `made_with`, applied to version `applied_to`."""

    worker: int
    made_with: int
    applied_to: int

    @property
    def staleness(self) -> int:
        return self.applied_to - self.made_with


class AsyncParameterServer(Replica):
    """Rank 0 serves the weights of `module`; other ranks train without synchronization.

        model = AsyncParameterServer(module, torch.optim.SGD, lr=0.1)

        def work():  # an ordinary training loop, on each worker
            for x, y in my_batches:
                model.zero_grad()
                F.mse_loss(model(x), y).backward()
                model.step()  # push the gradient, pull newer weights

        updates = model.run(work)  # call on all ranks; rank 0 serves

    After `run`, all ranks hold the same weights and the list of all updates. The server steps once
    per push, whereas a synchronous server steps once for all ranks. Buffers are not synchronized.

    Args:
        module: any module; all copies start with rank 0's weights.
        optimizer_cls: created on rank 0 with `defaults`.
        comm: at least 2 ranks; rank 0 serves, other ranks work. Default: all ranks.
        max_staleness: maximum lead over the slowest worker, in steps; None: no limit.
        order: the workers that supply the first pushes, in this order, for bitwise
            reproducible runs; later pushes are handled on arrival.

    Raises ValueError, on every rank, if the models differ between ranks or a parameter belongs to
    a different strategy; in `run`, if `order` names a worker that is waiting or done.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_cls: type[torch.optim.Optimizer],
        comm: Comm | None = None,
        max_staleness: int | None = None,
        order: Iterable[int] = (),
        **defaults: Any,
    ):
        super().__init__(module, comm)
        self.max_staleness, self.order = max_staleness, list(order)
        self._check_arguments()
        self._parameters_to_serve = self._parameters_to_average
        self._device = self._parameters_to_serve[0].device  # also for headers
        self.optimizer: torch.optim.Optimizer | None = None
        if self.is_server:
            self.optimizer = optimizer_cls(self._parameters_to_serve, **defaults)
        self.updates: list[Update] = []
        self.version = 0  # of this rank's weights

    @property
    def is_server(self) -> bool:
        return self.comm.rank == SERVER

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def run(self, work: Callable[[], object]) -> list[Update]:
        """Calls `work` on each worker; rank 0 serves until all calls have returned. Collective."""
        if self.is_server:
            self._serve()
        else:
            work()
            self._send_header(DONE)
        broadcast_tensors(self.module.parameters(), self.comm)
        self.updates = self.comm.all_gather_object(self.updates)[SERVER]
        self.version = len(self.updates)
        return self.updates

    def step(self) -> None:
        """Pushes the gradients, then pulls the server's current weights."""
        self._unchanged.check()
        self._send_header(self.version)
        for parameter in self._parameters_to_serve:
            if parameter.grad is not None:
                self.comm.send(parameter.grad, SERVER)
        version = torch.empty((), dtype=torch.int64, device=self._device)
        self.comm.recv(version, SERVER)
        for parameter in self._parameters_to_serve:
            self.comm.recv(parameter.detach(), SERVER)
        self.version = int(version)

    def _send_header(self, version: int) -> None:
        """Sends the weight version and, per parameter, whether it has a gradient."""
        gradients = [p.grad for p in self._parameters_to_serve]
        for gradient in (g for g in gradients if g is not None):
            check_dense(gradient)
        header = [version, *(g is not None for g in gradients)]
        self.comm.send(torch.tensor(header, dtype=torch.int64, device=self._device), SERVER)

    def _serve(self) -> None:
        """Serves until all workers are done; always replies to the slowest, to avoid deadlock."""
        length = 1 + len(self._parameters_to_serve)
        pushes = _Pushes(self.comm, length, self._device, self.order)
        steps = dict.fromkeys(range(1, self.comm.size), 0)  # per active worker
        waiting: list[int] = []  # workers that have pushed and await a reply
        while steps:
            worker, (made_with, *has_gradient) = pushes.next(waiting)
            if made_with == DONE:
                del steps[worker]
            else:
                self._apply_push(worker, made_with, has_gradient)
                steps[worker] += 1
                waiting.append(worker)
            for ready in [w for w in waiting if self._may_continue(steps[w], steps.values())]:
                waiting.remove(ready)
                self._reply(ready)
                pushes.expect(ready)

    def _apply_push(self, worker: int, made_with: int, has_gradient: list[int]) -> None:
        assert self.optimizer is not None
        for parameter, has in zip(self._parameters_to_serve, has_gradient, strict=True):
            parameter.grad = torch.empty_like(parameter) if has else None
            if parameter.grad is not None:
                self.comm.recv(parameter.grad, worker)
        self.optimizer.step()
        self.updates.append(Update(worker, made_with, applied_to=self.version))
        self.version += 1

    def _may_continue(self, steps: int, all_steps: Iterable[int]) -> bool:
        return self.max_staleness is None or steps <= min(all_steps) + self.max_staleness

    def _reply(self, worker: int) -> None:
        self.comm.send(torch.tensor(self.version, device=self._device), worker)
        for parameter in self._parameters_to_serve:
            self.comm.send(parameter, worker)

    def _check_arguments(self) -> None:
        if self.comm.size < 2:
            raise ValueError(
                "AsyncParameterServer: rank 0 serves and other ranks work, so at least 2 ranks are "
                "needed; this world has 1"
            )
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness}: choose 0 or more steps, or None")
        if others := set(self.order) - set(range(1, self.comm.size)):
            raise ValueError(
                f"order has {min(others)}, which is not a worker; choose ranks 1 to "
                f"{self.comm.size - 1}"
            )


class _Pushes:
    """Receives the headers of pushes: first in `order`, then by arrival."""

    def __init__(self, comm: Comm, length: int, device: torch.device, order: list[int]):
        self._comm, self._length, self._device = comm, length, device
        self._order = iter(order)
        self._pending: dict[int, tuple[Handle, torch.Tensor]] = {}
        for worker in range(1, comm.size):
            self.expect(worker)

    def expect(self, worker: int) -> None:
        header = torch.empty(self._length, dtype=torch.int64, device=self._device)
        self._pending[worker] = self._comm.irecv(header, worker), header

    def next(self, waiting: list[int]) -> tuple[int, list[int]]:
        """Returns (worker, header). Raises ValueError if `order` cannot be followed."""
        ordered = next(self._order, None)
        worker = self._first_to_arrive() if ordered is None else ordered
        values = [DONE]
        if worker in self._pending:
            handle, header = self._pending.pop(worker)
            handle.wait()
            values = header.tolist()
        if ordered is not None and values[0] == DONE:
            why = "it is too far ahead and waits" if worker in waiting else "it is done"
            raise ValueError(f"order asks for a push from worker {worker}, but {why}")
        return worker, values

    def _first_to_arrive(self) -> int:
        while True:
            for worker, (handle, _) in self._pending.items():  # longest-waiting first
                if handle.is_completed():
                    return worker
            time.sleep(POLL_S)
