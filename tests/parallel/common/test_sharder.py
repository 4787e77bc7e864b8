"""Which strategies fulfil which protocol, seen through what torch.compile puts around them."""

from typing import Any

import torch
from torch import nn

from labkit import DDP, MasterWeights, NaiveDDP, ZeRO3, ZeroOptimizer
from labkit.parallel.common import sharder
from tables import raises
from worlds import on_each_rank


class Delegates(nn.Module):
    """Has of its own nothing but what is inside, as torch.compile's wrapper."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inside" else getattr(self.inside, name)


class Fails(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        every = [p.grad for group in self.param_groups for p in group["params"]]
        if Fails.fails and any(gradient is not None for gradient in every):
            raise RuntimeError("this step failed")
        return super().step(closure)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))


@on_each_rank("world2")
def test_a_strategy_fulfils_its_protocols_also_through_a_wrapper() -> None:
    module = net()
    names = ("DataParallel", "OwnsPieces", "OwnsGradientPieces", "Sharder")

    def fulfilled(strategy: Any) -> list[bool]:
        return [sharder.implements(strategy, getattr(sharder, name)) for name in names]

    for strategy, expected in [
        (DDP(net()), [True, False, False, False]),
        (NaiveDDP(net()), [True, False, False, False]),
        (ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.1), [True] * 4),
        (ZeRO3(net()), [True] * 4),
        (MasterWeights(net().parameters(), torch.optim.SGD, lr=0.1), [False, True, False, False]),
        (net(), [False] * 4),
    ]:
        assert fulfilled(strategy) == expected
        assert sharder.shards_parameters(strategy) == isinstance(strategy, ZeRO3)
        if isinstance(strategy, nn.Module):
            wrapper = Delegates(strategy)
            assert fulfilled(wrapper) == expected
            assert sharder.unwrapped(wrapper) is (strategy.module if expected[0] else wrapper)


@on_each_rank("world2")
def test_a_step_that_fails_takes_the_factor_of_a_scaled_loss_with_it() -> None:
    weights = []
    for scaled_before in (False, True):
        torch.manual_seed(0)
        model = net().half()
        Fails.fails = False
        optimizer = ZeroOptimizer(model.parameters(), Fails, lr=0.1)
        Fails.fails = scaled_before
        x = torch.ones(2, 4, dtype=torch.half)
        if scaled_before:
            model(x).sum().mul(8).backward()
            optimizer.gradient_factor = 1 / 8
            raises("this step failed", optimizer.step, error=RuntimeError)
            optimizer.zero_grad()
            Fails.fails = False
        model(x).sum().backward()
        optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
