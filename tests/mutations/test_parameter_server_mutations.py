"""Faulty parameter servers must turn the contract red."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from data_parallel_contract import check_equal_to_single
from harness import Mutation, given, noticed
from labkit import AsyncParameterServer, ParameterServer
from test_async_parameter_server import ROUND, check_bound, check_stale_training
from test_parameter_server import served

pytestmark = pytest.mark.slow


class ForgetsAWorker(ParameterServer):
    """The bytes arrive, and one worker's gradient is not added."""

    def _gathered(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if self.comm.rank == self.comm.size - 1 and parameter.grad is not None:
            parameter.grad.zero_()
        return super()._gathered(parameter)


class DividesTwice(ParameterServer):
    def _gathered(self, parameter: nn.Parameter) -> torch.Tensor | None:
        total = super()._gathered(parameter)
        return None if total is None else total / self.comm.size


class ForgetsToDivide(ParameterServer):
    def _share(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class WorkersKeepOldWeights(ParameterServer):
    """They take part, and ignore the new weights."""

    def _pull(self, *_: object) -> None:
        before = [p.detach().clone() for p in self._parameters_to_average]
        super()._pull()
        if not self.is_server:
            for parameter, old in zip(self._parameters_to_average, before):
                parameter.detach().copy_(old)


class WorkersKeepGradients(ParameterServer):
    """And with them an optimizer state that nothing needs."""

    def _average(self) -> None:
        before = [p.grad for p in self._parameters_to_average]
        super()._average()
        if not self.is_server:
            for parameter, gradient in zip(self._parameters_to_average, before):
                parameter.grad = gradient


class AveragesWeights(ParameterServer):
    """Each rank takes a step of its own, and the server scatters the mean of the weights."""

    def _share(self, gradient: torch.Tensor) -> torch.Tensor:
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


class SendsTwice(ParameterServer):
    """Right weights, more bytes."""

    def _pull(self, *_: object) -> None:
        super()._pull()
        super()._pull()


class SaysUsed(ParameterServer):
    def _gathered(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return super()._gathered(parameter)


class LosesAPush(AsyncParameterServer):
    """One gradient arrives and changes nothing."""

    def _take(self, worker: int, made_with: int, there: list[int]) -> None:
        if self.version == 5:
            self.optimizer.step, step = lambda: None, self.optimizer.step
            super()._take(worker, made_with, there)
            self.optimizer.step = step
        else:
            super()._take(worker, made_with, there)


class HidesStaleness(AsyncParameterServer):
    def _take(self, worker: int, made_with: int, there: list[int]) -> None:
        super()._take(worker, self.version, there)


class KeepsOldWeights(AsyncParameterServer):
    """A worker takes new weights only once."""

    def step(self) -> None:
        before = [p.detach().clone() for p in self._parameters_to_serve]
        later = self.version > 0
        super().step()
        if later:
            for parameter, old in zip(self._parameters_to_serve, before):
                parameter.detach().copy_(old)


class AveragesOverWorkers(AsyncParameterServer):
    """As the synchronous one does: here each gradient is applied by itself."""

    def step(self) -> None:
        for parameter in self._parameters_to_serve:
            if parameter.grad is not None:
                parameter.grad /= self.comm.size - 1
        super().step()


class IgnoresTheBound(AsyncParameterServer):
    def _may_go_on(self, steps: int, of_all: Iterable[int]) -> bool:
        return True


FAULTS = [
    *(Mutation(faulty, check_equal_to_single, "gpt")
      for faulty in (ForgetsAWorker, DividesTwice, ForgetsToDivide, WorkersKeepOldWeights,
                     WorkersKeepGradients, AveragesWeights, SendsTwice)),
    Mutation(SaysUsed, check_equal_to_single, "awkward"),
]  # fmt: skip
ASYNC_FAULTS = [
    *(Mutation(faulty, check_stale_training, "sgd", order=ROUND)
      for faulty in (LosesAPush, HidesStaleness, KeepsOldWeights, AveragesOverWorkers)),
    Mutation(IgnoresTheBound, check_bound, 0, order=[1] * 4),
]  # fmt: skip


def trains(world: Any, faulty: Any, check: Any, case: str) -> None:
    check(world, served(faulty), case)


pair = {"size": 2, "backend": "gloo", "timeout_s": 20}
four = {**pair, "size": 4}
test_a_faulty_server_turns_the_contract_red = noticed(FAULTS, trains, AssertionError, **pair)
test_a_faulty_asynchronous_server_turns_the_contract_red = noticed(
    ASYNC_FAULTS, given, AssertionError, **four
)
