"""Faulty parameter servers must turn the tests red: a test that cannot fail proves nothing."""

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import nn

from labkit import AsyncParameterServer, ParameterServer, World
from test_async_parameter_server import ROUND, check_bound, check_stale_training
from test_parameter_server import check_served

pytestmark = pytest.mark.slow


class ForgetsAWorker(ParameterServer):
    """The bytes arrive, and one worker's are not added."""

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
    """They take part, and put the news beside their weights."""

    def _pull(self) -> None:
        before = [p.detach().clone() for p in self._parameters_to_average]
        super()._pull()
        if not self.is_server:
            for parameter, old in zip(self._parameters_to_average, before):
                parameter.detach().copy_(old)


class WorkersKeepGradients(ParameterServer):
    """And with them an optimizer state that nobody needs."""

    def _push(self) -> None:
        before = [p.grad for p in self._parameters_to_average]
        super()._push()
        if not self.is_server:
            for parameter, gradient in zip(self._parameters_to_average, before):
                parameter.grad = gradient


class AveragesWeights(ParameterServer):
    """Each rank takes a step of its own, and the server scatters the mean of the weights."""

    def _share(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    def _push(self) -> None:
        self._scheduled = False

    def _pull(self) -> None:
        for parameter in self._parameters_to_average:
            weights = parameter.detach()
            every = [torch.empty_like(weights) for _ in range(self.comm.size)]
            self.comm.gather(weights, every if self.is_server else None)
            if self.is_server:
                weights.copy_(torch.stack(every).mean(dim=0))
        super()._pull()


class SendsTwice(ParameterServer):
    """Right weights, more bytes."""

    def _pull(self) -> None:
        super()._pull()
        super()._pull()


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, backend="gloo", timeout_s=20) as world:
        yield world


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with World(4, backend="gloo", timeout_s=20) as world:
        yield world


@pytest.mark.parametrize(
    "faulty",
    [ForgetsAWorker, DividesTwice, ForgetsToDivide, WorkersKeepOldWeights, WorkersKeepGradients,
     AveragesWeights, SendsTwice],
)  # fmt: skip
def test_a_faulty_server_turns_the_contract_red(pair: World, faulty: type[ParameterServer]) -> None:
    with pytest.raises(AssertionError):
        check_served(pair, faulty, "gpt", "AdamW")


def test_what_was_not_used_and_is_not_said_so_turns_the_contract_red(pair: World) -> None:
    with pytest.raises(AssertionError):
        check_served(pair, SaysUsed, "awkward", "AdamW")


class SaysUsed(ParameterServer):
    def _gathered(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return super()._gathered(parameter)


class LosesAPush(AsyncParameterServer):
    """One gradient arrives and changes nothing."""

    def _take(self, worker: int, made_with: int, there: list[int]) -> None:
        if self.version == 5:
            assert self.optimizer is not None
            self.optimizer.step, step = lambda: None, self.optimizer.step  # type: ignore[method-assign]
            super()._take(worker, made_with, there)
            self.optimizer.step = step  # type: ignore[method-assign]
        else:
            super()._take(worker, made_with, there)


class TellsNothingOfStaleness(AsyncParameterServer):
    def _take(self, worker: int, made_with: int, there: list[int]) -> None:
        super()._take(worker, self.version, there)


class KeepsOldWeights(AsyncParameterServer):
    """A worker that takes the news only once."""

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


@pytest.mark.parametrize(
    "faulty", [LosesAPush, TellsNothingOfStaleness, KeepsOldWeights, AveragesOverWorkers]
)
def test_a_faulty_asynchronous_server_turns_the_contract_red(
    four: World, faulty: type[AsyncParameterServer]
) -> None:
    with pytest.raises(AssertionError):
        check_stale_training(four, faulty, "SGD", order=ROUND)


def test_a_bound_that_is_ignored_turns_red(four: World) -> None:
    with pytest.raises(AssertionError):
        check_bound(four, IgnoresTheBound, 0, order=[1] * 4)


def test_the_contracts_are_green_on_the_real_ones(pair: World, four: World) -> None:
    check_served(pair, ParameterServer, "gpt", "AdamW")
    check_stale_training(four, AsyncParameterServer, "SGD", order=ROUND)
    check_bound(four, AsyncParameterServer, 0)
