"""Faulty parameter servers must turn the contract red."""

from typing import Any

import pytest
import torch

from data_parallel_contract import check_equal_to_single
from harness import Mutation, around, edits, given, noticed
from labkit import AsyncParameterServer, ParameterServer, World
from labkit.parallel.parameter_server import asynchronous, synchronous
from test_async_parameter_server import ROUND, check_bound, check_stale_training
from test_parameter_server import served

pytestmark = pytest.mark.slow


class AveragesWeights(ParameterServer):
    """Each rank takes a step of its own, and the server scatters the mean of the weights."""

    def _divide(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    def _average(self) -> None:
        self._scheduled = False

    def _pull(self, *_: object) -> None:
        for parameter in self._parameters_to_average:
            weights = parameter.detach()
            every = [torch.empty_like(weights) for _ in range(self.comm.size)]
            self.comm.gather(weights, every if self.is_server else None)
            if self.is_server:
                weights.copy_(torch.stack(every).mean(dim=0))
        super()._pull()


def trains(world: World, server: Any = ParameterServer, case: str = "gpt") -> None:
    check_equal_to_single(world, served(server), case)


def is_stale(world: World) -> None:
    check_stale_training(world, AsyncParameterServer, "sgd", order=ROUND)


def is_bounded(world: World) -> None:
    check_bound(world, AsyncParameterServer, 0, order=[1] * 4)


FAULTS = edits(
    synchronous,
    ("forgets a worker", "for gradient in others:", "for gradient in others[1:]:", trains),
    ("divides twice", "return total", "return total / self.comm.size", trains),
    ("forgets to divide", "return gradient / self.comm.size", "return gradient", trains),
    ("workers ignore the new weights",
     "self.comm.scatter(weights, copies", "self.comm.scatter(weights.clone(), copies", trains),
    ("workers keep gradients",  # and with them an optimizer state that nothing needs
     "total if is_used else None", "total if is_used else parameter.grad", trains),
    ("sends the weights twice",
     "self.comm.scatter(weights, copies, src=SERVER)",
     "[self.comm.scatter(weights, copies, src=SERVER) for _ in range(2)]", trains),
    ("says that all are used",
     "used = parameter.grad is not None", "used = True", trains, ParameterServer, "awkward"),
)  # fmt: skip
ASYNC_FAULTS = edits(
    asynchronous,
    ("loses a push",
     "self.optimizer.step()\n", "self.version == 5 or self.optimizer.step()\n", is_stale),
    ("hides staleness",
     "Update(worker, made_with, applied_to", "Update(worker, self.version, applied_to", is_stale),
    ("workers take new weights only once",
     "self.comm.recv(parameter.detach(), SERVER)",
     "self.comm.recv(parameter.detach().clone() if self.version else parameter.detach(), SERVER)",
     is_stale),
    ("averages over the workers",  # each gradient is applied by itself
     "self.comm.send(parameter.grad, SERVER)",
     "self.comm.send(parameter.grad / (self.comm.size - 1), SERVER)", is_stale),
    ("ignores the bound", "return self.max_staleness is None or", "return True or", is_bounded),
)  # fmt: skip

pair = {"size": 2, "backend": "gloo", "timeout_s": 20}
four = {**pair, "size": 4}
test_a_faulty_server_turns_the_contract_red = noticed(FAULTS, around, AssertionError, **pair)
test_a_server_of_weights_turns_the_contract_red = noticed(
    [Mutation(AveragesWeights, trains)], given, AssertionError, **pair
)
test_a_faulty_asynchronous_server_turns_the_contract_red = noticed(
    ASYNC_FAULTS, around, AssertionError, **four
)
