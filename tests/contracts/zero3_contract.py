"""What ZeRO-3 must do, as a function that raises AssertionError: the weights of single-process
training, the bytes of the formula, a share of all that is held."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from data_parallel_contract import AGREE, LENGTH, MODELS, ROWS, STEPS
from labkit import Comm, Single, Text, World, ZeRO3, listen, loss
from labkit.holdings import Footprint
from labkit.parallel.common.held import held

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
}
Told = tuple[dict[str, torch.Tensor], list[float], int, Footprint, Footprint]


def trained(wrap: Callable[[nn.Module], nn.Module], case: str, optimizer: str) -> Told:
    """On a rank: train, each rank from another start; weights without weight decay have a group."""
    comm = Comm()
    torch.manual_seed(100 + comm.rank)
    module = MODELS[case]().double()
    if comm.rank == 0:
        torch.manual_seed(0)
        module = MODELS[case]().double()
    predicted = ZeRO3.predict(module, comm.size)
    model = wrap(module)
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
    groups = [
        {"params": [p for name, p in named if "weight" in name]},
        {"params": [p for name, p in named if "weight" not in name], "lr": 3e-3},
    ]
    stepper = OPTIMIZERS[optimizer](groups)
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
    assert len(set(sent)) == 1, f"the bytes of a step change: {sent}"
    state: Any = getattr(model, "full_state_dict", module.state_dict)()
    weights = {name: x.clone() for name, x in state.items()}
    return weights, losses, sent[0], held(model, stepper), predicted


@cache
def oracle(case: str, optimizer: str) -> Told:
    with World(1) as one:
        return one.run(trained, Single, case, optimizer)[0]


def check_zero3(
    world: World, wrap: Callable[[nn.Module], nn.Module], case: str, optimizer: str,
    formula: bool = True,
) -> None:  # fmt: skip
    """The contract; with `formula` also the bytes, of settings that `predict` takes by default."""
    expected, expected_losses, _, whole, _ = oracle(case, optimizer)
    runs, n = world.run(trained, wrap, case, optimizer), world.size
    for rank, (weights, *_) in enumerate(runs):
        assert weights.keys() == expected.keys()
        for name, x in expected.items():
            worst = float((weights[name] - x).abs().max()) if x.numel() else 0
            assert worst <= AGREE, f"{name} of rank {rank} is off by {worst:.1e}"
    for step, one in enumerate(expected_losses):
        mean = sum(losses[step] for _, losses, *_ in runs) / n
        assert abs(mean - one) <= AGREE, f"loss of step {step}: {mean}, {one}"
    if not formula:
        return
    predicted = runs[0][4]
    for name in ("parameter_bytes", "gradient_bytes"):
        every = sum(getattr(one[3], name) for one in runs)
        assert every == getattr(whole, name), f"{name} of all ranks: {every}"
    if case == "gpt":  # every unit is used once
        for _, _, sent, *_ in runs:
            assert sent == predicted.bus_bytes, f"{sent} bytes, not {predicted.bus_bytes}"
    if case == "gpt" and optimizer.startswith("adam"):
        mean_bytes = sum(one[3].optimizer_bytes for one in runs) / n
        assert mean_bytes == predicted.optimizer_bytes
