"""What a loss scaler must do under every strategy. Three of ten steps have one inf or NaN in a
gradient of one rank: all ranks skip exactly these, have the scales of one process, and end with its
weights, in float64 to 1e-10, with a model in fp16 to its precision."""

import random
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from labkit import (
    DDP,
    Comm,
    GradScaler,
    MasterWeights,
    Single,
    World,
    ZeRO3,
    ZeroOptimizer,
    clip_grad_norm,
)
from small_models import difference

STEPS, ROWS = 10, 12
BAD = {2: torch.inf, 3: torch.nan, 7: -torch.inf}  # step -> what one rank finds in a gradient
MIB = 2**20
equal = partial(torch.testing.assert_close, atol=0, equal_nan=True)


class Net(nn.Module):
    """Its last parameter has a gradient that can be spoiled, and no other parameter's is then."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
        self.shift = nn.Parameter(torch.zeros(5))
        self.spoil: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift * 1
        if self.spoil is not None and shift.requires_grad:
            shift.register_hook(partial(_spoiled, value=self.spoil))
        return self.body(x) + shift  # type: ignore[no-any-return]


def _spoiled(gradient: torch.Tensor, value: float) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[1] = value
    return gradient


@dataclass
class Seen:
    """What one rank has seen."""

    losses: list[float]  # of its rows
    norms: list[float]
    scales: list[float]  # after each step
    taken: list[bool]
    state: dict[str, Any]
    weights: dict[str, torch.Tensor]


Built = tuple[nn.Module, torch.optim.Optimizer, Any]  # wrapped, optimizer, what is clipped
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}  # unlike Adam, it sees how large gradients are


def build(strategy: str, net: nn.Module, dtype: torch.dtype) -> Built:
    if strategy == "zero-3":
        half = dtype == torch.float16
        sharded = ZeRO3(net, compute_dtype=dtype if half else None)
        return sharded, torch.optim.SGD(sharded.parameters(), **SGD), sharded
    net.to(dtype)
    if strategy in ("zero-1", "zero-2"):
        zero = ZeroOptimizer(
            net.parameters(), torch.optim.SGD, stage=int(strategy[-1]), bucket_mb=100 / MIB, **SGD
        )
        return net, zero, zero
    wrapped = DDP(net, bucket_mb=100 / MIB) if strategy == "ddp" else Single(net)
    optimizer = MasterWeights(net.parameters(), torch.optim.SGD, **SGD)
    return wrapped, optimizer, optimizer


def train(
    strategy: str,
    dtype: torch.dtype,
    rank: int = 0,
    size: int = 1,
    max_norm: float | None = None,
    parts: int = 1,
    culprit: int = 0,
) -> Seen:
    torch.manual_seed(0)
    net = Net().half().to(torch.float64 if dtype == torch.float64 else torch.float32)
    every_x, every_y = torch.randn(STEPS, ROWS, 6).half(), torch.randn(STEPS, ROWS, 5)
    wrapped, optimizer, clipped = build(strategy, net, dtype)
    syncs = optimizer if isinstance(optimizer, ZeroOptimizer) else wrapped
    scaler = GradScaler(init_scale=2.0**10, growth_interval=3)
    seen = Seen([], [], [], [], {}, {})
    for step in range(STEPS):
        net.spoil = BAD.get(step) if rank == culprit % size else None
        x = every_x[step].tensor_split(size)[rank].to(dtype).chunk(parts)
        y = every_y[step].tensor_split(size)[rank].chunk(parts)
        losses = []
        for i in range(parts):
            with nullcontext() if i == parts - 1 else syncs.no_sync():  # type: ignore[operator]
                out = wrapped(x[i])
                losses.append((out - y[i].to(torch.promote_types(out.dtype, y[i].dtype))) ** 2)
                scaler.scale(losses[-1].mean() / parts).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            seen.norms.append(clip_grad_norm(clipped, max_norm).item())
        before = scaler.skipped
        scaler.step(optimizer)
        scaler.update()
        seen.losses.append(torch.cat(losses).mean().item())
        seen.scales.append(scaler.get_scale())
        seen.taken.append(scaler.skipped == before)
        wrapped.zero_grad() if step % 2 else optimizer.zero_grad()  # type: ignore[func-returns-value]
    seen.state = scaler.state_dict()
    full = wrapped.full_state_dict() if isinstance(wrapped, ZeRO3) else net.state_dict()
    seen.weights = {name: x.double() for name, x in full.items()}
    return seen


@cache
def alone(dtype: torch.dtype, max_norm: float | None = None, parts: int = 1) -> Seen:
    """The oracle: one process, which is no rank."""
    return train("single", dtype, max_norm=max_norm, parts=parts)


def check_equal_to_single(world: World, strategy: str, dtype: torch.dtype, **options: Any) -> None:
    """Raises AssertionError, or what the world raises."""
    expected = alone(dtype, **{k: x for k, x in options.items() if k != "culprit"})

    def run() -> Seen:
        comm = Comm()
        return train(strategy, dtype, comm.rank, comm.size, **options)

    ranks = world.run(run)
    agree = 1e-10 if dtype == torch.float64 else 4e-3
    mean = [sum(losses) / len(ranks) for losses in zip(*(seen.losses for seen in ranks))]
    for seen in ranks:
        assert seen.taken == expected.taken == [step not in BAD for step in range(STEPS)]
        assert seen.scales == expected.scales and seen.state == expected.state
        equal(mean, expected.losses, rtol=agree)
        equal(seen.norms, expected.norms, rtol=agree)
        assert difference(seen.weights, expected.weights) <= agree


def fresh(
    dtype: torch.dtype = torch.float32, lr: float = 0.1, **options: Any
) -> tuple[nn.Linear, torch.Tensor, Any, GradScaler]:
    """A small model of the type, an input, an optimizer, and a scaler with these options."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).to(dtype), torch.randn(4, 3).to(dtype)
    if dtype == torch.float32:
        return model, x, torch.optim.SGD(model.parameters(), lr=lr), GradScaler(**options)
    masters = MasterWeights(model.parameters(), torch.optim.SGD, lr=lr)
    return model, x, masters, GradScaler(**options)


def scaled_step(
    scaler: Any, loss: torch.Tensor, optimizer: Any, max_norm: float | None = None
) -> None:
    """Backward through the scaled loss, clipping, a step, and the next scale."""
    scaler.scale(loss).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        clip_grad_norm(optimizer, max_norm)
    scaler.step(optimizer)
    scaler.update()


# --- the same as torch.amp.GradScaler ---


OPTIONS = [  # some begin where a gradient is soon inf, or the scale itself
    (2.0**16, 2.0, 0.5, 2), (2.0**126, 2.0, 0.5, 1), (0.75, 1.7, 0.3, 1),
    (2.0**126, 1.7, 0.3, 2), (2.0**16, 1.7, 0.5, 5), (0.75, 2.0, 0.3, 5),
]  # fmt: skip


def check_as_torch(seed: int) -> None:
    """Random infs, optimizers, `unscale_` and reloads leave torch's scale, count and weights."""
    draw = random.Random(seed)
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    options = dict(zip(names, OPTIONS[seed % len(OPTIONS)], strict=True))
    scalers: list[Any] = [GradScaler(**options), torch.amp.GradScaler("cpu", **options)]
    parameters = [[nn.Parameter(torch.ones(3)) for _ in range(4)] for _ in scalers]
    optimizers = [
        [torch.optim.SGD(ps[:2], 0.1, 0.9), torch.optim.SGD(ps[2:], 0.1)] for ps in parameters
    ]
    for _ in range(60):
        chance = draw.choice([0.0, 0.0, 0.2])
        gradients = torch.tensor([[draw.uniform(-1, 1) for _ in range(3)] for _ in range(4)])
        for gradient in gradients:
            if draw.random() < chance:
                gradient[1] = draw.choice([torch.inf, -torch.inf, torch.nan])
        unscaled = [draw.random() < 0.5 for _ in range(2)]
        second_steps, reloads = draw.random() < 0.7, draw.random() < 0.2
        for scaler, ps, some in zip(scalers, parameters, optimizers, strict=True):
            scale = scaler.scale(torch.ones(()))
            for p, gradient in zip(ps, gradients, strict=True):
                p.grad = gradient * scale
            for optimizer, first in list(zip(some, unscaled, strict=True))[: 1 + second_steps]:
                if first:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
                scaler.step(optimizer)
            scaler.update()
        ours, theirs = (scaler.state_dict() for scaler in scalers)
        assert ours == theirs, (ours, theirs)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for x, y in zip(*parameters, strict=True):
            assert torch.equal(x, y)
        if reloads:  # each takes the other's
            scalers = [GradScaler(), torch.amp.GradScaler("cpu")]
            scalers[0].load_state_dict(theirs), scalers[1].load_state_dict(ours)
