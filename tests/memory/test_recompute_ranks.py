"""On ranks: with what is computed again, strategies train the same weights from the same bytes."""

from typing import Any

import pytest
import torch

from labkit import DDP, World, ZeRO3, ZeroOptimizer, dry_run, listen
from labkit.memory.edits import Recompute
from labkit.memory.policies import keep_products
from labkit.models import GPT
from labkit.runtime.attach import attach

pytestmark = pytest.mark.slow

WHAT = {"full": "full", "selective": "selective", "products kept": keep_products}


def trained(strategy: str, what: Any, inside: bool = True) -> tuple[Any, int]:
    """Weights after two steps, with masks that differ by rank, and the bytes of the last step."""
    comm = attach().comm
    torch.manual_seed(0)
    model: Any = GPT.preset("tiny", dropout=0.1).double()
    if what is not None and inside:
        Recompute(model, what=what)
    blocks = model.blocks
    wrapped = {"ddp": DDP, "zero-2": lambda module: module, "zero-3": ZeRO3}[strategy](model)
    if what is not None and not inside:
        Recompute(model, what=what, blocks=blocks)
    optimizer: Any = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    if strategy == "zero-2":
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=2, lr=1e-2)
    torch.manual_seed(comm.rank)
    for _ in range(2):
        optimizer.zero_grad()
        with listen() as events:
            wrapped(torch.randint(256, (2, 16))).square().mean().backward()
        optimizer.step()
    state = wrapped.full_state_dict() if strategy == "zero-3" else model.state_dict()
    return {name: x.clone() for name, x in state.items()}, sum(x.bus_bytes for x in events)


@pytest.mark.parametrize("strategy", ["ddp", "zero-2", "zero-3"])
def test_strategies_train_as_without(world2: World, strategy: str) -> None:
    without = world2.run(trained, strategy, None)
    for what in WHAT.values():
        for (weights, sent_bytes), (expected, bytes_) in zip(
            world2.run(trained, strategy, what), without, strict=True
        ):
            assert sent_bytes == bytes_, "a unit is gathered as often as without"
            assert all(torch.equal(weights[name], x) for name, x in expected.items())


def test_zero3_may_be_edited_when_it_is_wrapped(world2: World) -> None:
    (inside, _), _ = world2.run(trained, "zero-3", "full")
    (outside, _), _ = world2.run(trained, "zero-3", "full", inside=False)
    assert inside and all(torch.equal(inside[name], x) for name, x in outside.items())


def test_a_dry_run_computes_again_too() -> None:
    def train(what: Any) -> None:
        model = GPT.preset("tiny", dropout=0.1)
        if what is not None:
            Recompute(model, what=what)
        wrapped = DDP(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            wrapped(torch.zeros(8, 16, dtype=torch.long)).sum().backward()
            optimizer.step()

    without, full, selective, products = (
        len(dry_run(train, what, ranks=4, as_on="cpu").ranks[0].operations)
        for what in (None, *WHAT.values())
    )
    assert without < selective < products < full
