"""What every data-parallel strategy must do: after some steps in float64 the weights of all ranks
equal single-process training on the same batches to 1e-10; the bytes sent and held are exactly
those of the strategy's formula; and what it shards the ranks hold once together."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from labkit import DDP, GPT, Comm, Single, Text, World, listen, loss
from labkit.holdings import Footprint
from labkit.parallel.common.held import held
from small_models import difference

CONTRACT_SIZES = (1, 2, 3, 4)
STEPS, ROWS, LENGTH = 10, 7, 16  # 7 rows are uneven on 2, 3 and 4 ranks; the last step has 3
AGREE = 1e-10


class Awkward(nn.Module):
    """Odd sizes; frozen, used twice, tied, transposed, empty and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.twice = nn.Linear(7, 7)
        self.slanted = nn.Parameter(torch.randn(5, 7).t() / 3)  # not contiguous, [7, 5]
        self.back = nn.Linear(5, 7, bias=False)
        self.empty = nn.Parameter(torch.empty(0))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(7, 256, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.frozen(self.table(tokens)))))
        x = self.back(torch.tanh(x @ self.slanted)) + self.empty.sum()
        return self.head(x)


class Branching(nn.Module):
    """`both` is used by rank 0 alone, `nobody` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.both, self.nobody = (nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        x = self.always(x)
        return self.both(x) if deep else x


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": lambda: GPT.preset("tiny"), "awkward": Awkward}
CASES = list(MODELS)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}
Wrap = Callable[[nn.Module], nn.Module]


def torchs_own(groups: Any, optimizer_cls: Any, **options: Any) -> torch.optim.Optimizer:
    return optimizer_cls(groups, **options)


def replicated(module: nn.Module, size: int, rank: int) -> Footprint:
    return DDP.predict(module, size)


@dataclass(frozen=True)
class Strategy:
    """How to train with it, and what it promises.

    wrap         module -> model
    optimizer    (groups of the model's parameters, optimizer class, its options) -> optimizer
    predict      (module, size, rank) -> its formula, with Adam
    sharded      the fields of a footprint that the ranks hold once together; None: not checked
    weights      (model, module) -> whole parameters and buffers, by name, on every rank
    bytes_of     the cases whose bytes the formula has
    mean         the formula is of the mean of the ranks, not of each
    first_agrees in the first step, the ranks also agree on what they have seen
    """

    wrap: Wrap = Single
    optimizer: Callable[..., torch.optim.Optimizer] = torchs_own
    predict: Callable[[nn.Module, int, int], Footprint] = replicated
    sharded: tuple[str, ...] | None = ()
    weights: Callable[[Any, nn.Module], Mapping[str, torch.Tensor]] = lambda _, x: x.state_dict()
    bytes_of: Collection[str] = ("gpt", "awkward")
    mean: bool = False
    first_agrees: bool = True


@dataclass
class Run:
    weights: dict[str, torch.Tensor]
    losses: list[float]
    held: Footprint
    predicted: Footprint
    sent_bytes: int  # in one step
    wire_bytes: int  # put on the wire by this rank in it


def groups_of(model: nn.Module, names: list[str], case: str) -> list[dict[str, Any]]:
    """The awkward model has two groups, of which the second learns slower."""
    if case != "awkward":
        return [{"params": list(model.parameters())}]
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    first, second = (  # a sharder may have no element of a parameter
        [named[name] for name in half if name in named] for half in (names[::2], names[1::2])
    )
    return [{"params": first}, {"params": second, "lr": 1e-3}]


def weights_after(
    strategy: Strategy | Wrap,
    case: str,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "adamw",
) -> Run:
    """On a rank: `STEPS` steps, each rank from another start."""
    comm = Comm()
    plan = strategy if isinstance(strategy, Strategy) else Strategy(strategy)
    torch.manual_seed(100 * comm.rank)
    module = MODELS[case]().to(dtype)
    predicted = plan.predict(module, comm.size, comm.rank)
    names = [name for name, _ in module.named_parameters()]
    model = plan.wrap(module)
    optimizer_cls, options = OPTIMIZERS[optimizer]
    stepper = plan.optimizer(groups_of(model, names, case), optimizer_cls, **options)
    text, losses, sent = Text(), [], []
    for step in range(STEPS):
        batch = text.batch(step, ROWS if step < STEPS - 1 else 3, LENGTH)
        batch = batch.slice(comm.rank, comm.size)
        stepper.zero_grad()
        with listen() as events:
            value = loss(model(batch.x), batch)
            value.backward()
            stepper.step()
        losses.append(value.item())
        sent.append(sum(event.bus_bytes for event in events))
    steady = sent[1:] if plan.first_agrees else sent
    assert len(set(steady)) == 1, f"the bytes of a step change: {sent}"
    wire_bytes = sum(event.wire_bytes for event in events)
    weights = {name: x.detach().clone() for name, x in plan.weights(model, module).items()}
    return Run(weights, losses, held(module, stepper), predicted, steady[0], wire_bytes)


@cache
def oracle_of(case: str, optimizer: str) -> Run:
    with World(1) as one:
        return one.run(weights_after, Single, case, optimizer=optimizer)[0]


def check_equal_to_single(
    world: World, strategy: Strategy | Wrap, case: str, optimizer: str = "adamw"
) -> list[Run]:
    oracle = oracle_of(case, optimizer)
    plan = strategy if isinstance(strategy, Strategy) else Strategy(strategy)
    runs = world.run(weights_after, strategy, case, optimizer=optimizer)
    n = world.size
    for rank, run in enumerate(runs):
        off = difference(run.weights, oracle.weights)
        assert off <= AGREE, f"rank {rank} is off by {off:.1e}"
    for step, expected_loss in enumerate(oracle.losses):
        mean = sum(run.losses[step] for run in runs) / n
        assert abs(mean - expected_loss) <= AGREE, f"loss of step {step}: {mean}, {expected_loss}"
    if case in plan.bytes_of:
        sent, should = sum(run.sent_bytes for run in runs), round(n * runs[0].predicted.bus_bytes)
        assert sent == should, f"{sent} bytes sent by all, not {should}"
    _check_held(runs, oracle, plan, all_used=case == "gpt", adam=optimizer[:4] == "adam")
    return runs


def _check_held(runs: list[Run], oracle: Run, plan: Strategy, all_used: bool, adam: bool) -> None:
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        here, whole = [getattr(run.held, name) for run in runs], getattr(oracle.held, name)
        if all_used and adam:  # the formula holds to the byte
            formula = [getattr(run.predicted, name) for run in runs]
            has, should = ([sum(here)], [round(sum(formula))]) if plan.mean else (here, formula)
            assert has == should, f"{name}: held {has}, predicted {should}"
        if plan.sharded is None:
            continue
        if name not in plan.sharded:
            assert set(here) == {whole}, f"{name}: {here}, not {whole} on each rank"
            continue
        # A step count for each piece, none for no elements.
        least, most = (-4, 4 * 64 * len(runs)) if adam and name == "optimizer_bytes" else (0, 0)
        assert least <= sum(here) - whole <= most, f"{name}: {here}, together not {whole}"
