"""Communication buffers do not grow with the model: ZeRO-R's C_B (arXiv 1910.02054, 5.2)."""

from typing import Any

import pytest
import torch
from torch import nn

from labkit import MLP, World, ZeroOptimizer, record
from labkit.precision import master
from labkit.precision.master import MasterWeights
from labkit.trace import CATEGORIES
from small_models import take_steps

BUCKET_MB = 0.02
WIDTH = 64


def train(layers: int, bucket_mb: float) -> None:
    model = MLP([WIDTH] * (layers + 1))
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, 2, bucket_mb=bucket_mb, lr=0.1)
    take_steps(optimizer, lambda _: model(torch.ones(4, WIDTH)).sum())


def gradients_beyond_the_share(layers: int, bucket_mb: float) -> int:
    """The most bytes of gradients on a rank during backward, less what it keeps in the end."""
    with World(2, backend="gloo") as world, record(detail_step=1) as trace:
        world.run(train, layers, bucket_mb)
    rank, place = trace.ranks[0], CATEGORIES.index("gradients")
    (backward,) = (x for x in rank.spans if x.phase == "backward" and x.depth == 0 and x.step == 1)
    held = [point.held_bytes[place] for point in rank.memory
            if backward.began_s <= point.when_s <= backward.ended_s]  # fmt: skip
    return max(held) - 4 * layers * (WIDTH + 1) * WIDTH // 2


@pytest.mark.slow
def test_bytes_in_flight_do_not_grow_with_the_model():
    small, large = (gradients_beyond_the_share(layers, BUCKET_MB) for layers in (8, 16))
    assert small == large > 0


@pytest.mark.slow
def test_one_bucket_for_everything_would_be_seen():
    small, large = (gradients_beyond_the_share(layers, 100) for layers in (4, 16))
    assert large > 3 * small


def most_fp32_gradients(layers: int) -> int:
    """In bytes, of those that an optimizer is given at once."""
    given: list[int] = []

    class CountedSGD(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            gradients = [p.grad for group in self.param_groups for p in group["params"]]
            given.append(sum(g.nbytes for g in gradients if g is not None))
            super().step()

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).bfloat16()
    optimizer = MasterWeights(model.parameters(), CountedSGD, lr=0.1)
    model(torch.ones(4, WIDTH, dtype=torch.bfloat16)).sum().backward()
    given.clear()
    optimizer.step()
    return max(given)


def test_fp32_gradients_of_master_weights_do_not_grow_with_the_model(monkeypatch: Any) -> None:
    monkeypatch.setattr(master, "CHUNK_BYTES", 4 * WIDTH * WIDTH)
    assert most_fp32_gradients(4) == most_fp32_gradients(16) <= 2 * 4 * WIDTH * WIDTH
    monkeypatch.setattr(master, "CHUNK_BYTES", 2**40)  # a mistake: all at once
    assert most_fp32_gradients(16) == 4 * most_fp32_gradients(4)
