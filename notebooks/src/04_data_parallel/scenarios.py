"""Runs lab 04's answers on ranks, and computes the results of a single process."""

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.course.exercise import Student
from labkit.course.samples import small_model, some_rows
from labkit.models import GPT
from labkit.parallel import AsyncParameterServer

Weights = dict[str, Tensor]
STEPS = 2


def weights_of(model: nn.Module) -> Weights:
    """A copy of each parameter, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Momentum:
    """SGD with momentum, hand-written: a process's first torch.optim optimizer loads torch._dynamo,
    which takes 1.3 s per rank."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.02):
        self.parameters, self.lr = list(parameters), lr
        self.state: dict[nn.Parameter, Tensor] = {}

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                before = self.state.get(p, torch.zeros_like(p))
                self.state[p] = 0.9 * before + p.grad
                p.detach().sub_(self.lr * self.state[p])


def two_steps(comm: Any, student: Student) -> tuple[list[Weights], int]:
    """The weights after each of two steps, and the number of parameters with optimizer state."""
    model, weights = small_model(), []
    optimizer = Momentum(model.parameters())
    for step in range(STEPS):
        x, y = some_rows(4 * comm.size, seed=step)
        shard = slice(4 * comm.rank, 4 * comm.rank + 4)
        optimizer.zero_grad()
        F.mse_loss(model(x[shard]), y[shard]).backward()
        student(comm, model, optimizer)
        weights.append(weights_of(model))
    return weights, len(optimizer.state)


def expected_steps(size: int) -> list[Weights]:
    """The weights of a single process, before the first and after each of the two steps."""
    model = small_model()
    optimizer, weights = Momentum(model.parameters()), [weights_of(model)]
    for step in range(STEPS):
        x, y = some_rows(4 * size, seed=step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        weights.append(weights_of(model))
    return weights


def staleness_of(comm: Any, orders: list[list[int]]) -> list[list[int]]:
    """The staleness of each update if labkit's server takes pushes in these orders."""
    staleness = []
    for order in orders:
        model = AsyncParameterServer(nn.Linear(1, 1), Momentum, comm, order=order)  # type: ignore[arg-type]

        def work(model: AsyncParameterServer = model, steps: int = order.count(comm.rank)) -> None:
            for _ in range(steps):
                model.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                model.step()

        staleness.append([update.staleness for update in model.run(work)])
    return staleness


# --- exercise 3: each worker moves the weights toward its own target

LR, PUSHES = 0.25, 3


def gradient(worker: int, weights: Tensor) -> Tensor:
    """The gradient of half the squared distance from `weights` [3] to the worker's target."""
    return weights - torch.tensor([float(worker), -1.0, 10.0 * worker])


def run_server(comm: Any, student: Student, late: int) -> Any:
    """Run the student's server on rank 0. Worker `late` starts after the other worker is done."""
    weights = torch.zeros(3)
    if comm.rank == 0:
        taken = student(comm, weights, LR, PUSHES)
        return taken, weights
    other = 3 - comm.rank
    if comm.rank == late:
        comm.recv(torch.empty(1), other, tag=1)
    pulled = []
    for _ in range(PUSHES):
        comm.send(gradient(comm.rank, weights), 0)
        weights = torch.empty(3)
        comm.recv(weights, 0)
        pulled.append(weights)
    if comm.rank != late:
        comm.send(torch.ones(1), other, tag=1)
    return pulled


def expected_service(taken: list[int]) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """The final weights, and the weights that each worker pulls, if pushes arrive in this order."""
    weights = torch.zeros(3)
    pulled: dict[int, list[Tensor]] = {1: [], 2: []}
    for worker in taken:
        worker_weights = pulled[worker][-1] if pulled[worker] else torch.zeros(3)
        weights = weights - LR * gradient(worker, worker_weights)
        pulled[worker].append(weights)
    return weights, pulled


# --- exercise 4: several servers

SERVERS = 4
BEST_BYTES = 10_709_952  # best known, over the busiest link, for `sizes_of_gpt`


def sizes_of_gpt() -> list[int]:
    """Bytes of each parameter tensor in a small GPT."""
    with torch.device("meta"):
        return [p.nbytes for p in GPT.preset("1M", vocab=256).parameters()]


def busiest_link_bytes(servers: list[int], nbytes: list[int], size: int = SERVERS) -> int:
    """Bytes in and out per step on the busiest link: each rank serves its parameters to other
    ranks, and is a worker for all other parameters. Rank `servers[i]` serves parameter i."""
    served = [0] * size
    for server, size_bytes in zip(servers, nbytes, strict=True):
        served[server] += size_bytes
    return max(2 * (size - 1) * own + 2 * (sum(nbytes) - own) for own in served)


def split_bytes(nbytes: list[int]) -> int:
    """Bytes on the busiest link if each server had exactly 1/n of the parameter bytes."""
    each = -(-sum(nbytes) // SERVERS)
    return 2 * (SERVERS - 1) * each + 2 * (sum(nbytes) - each)


def push_and_pull(comm: Any, student: Student, nbytes: list[int]) -> Any:
    """The student's placement, after its pushes and pulls have been sent."""
    servers = student(list(nbytes), comm.size)
    if is_placement(servers, len(nbytes), comm.size):
        for server, size_bytes in zip(map(int, servers), nbytes):
            is_server = comm.rank == server
            x = torch.zeros(size_bytes // 4)
            comm.gather(
                x, [torch.empty_like(x) for _ in range(comm.size)] if is_server else None, server
            )
            comm.scatter(x, [x] * comm.size if is_server else None, server)
        return [int(x) for x in servers]
    return servers


def is_placement(servers: Any, count: int, size: int) -> bool:
    """Whether `servers` names a rank below `size` for each of `count` parameters."""
    listed = isinstance(servers, list) and len(servers) == count
    return listed and all(isinstance(x, Integral) and 0 <= int(x) < size for x in servers)
