"""Tests whether an optimizer can be sharded. Updates must be elementwise, as in SGD and Adam (not
Adafactor, Muon or LBFGS). Groups must not count steps, because ZeRO steps once per bucket."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
from torch import nn

SHAPE, CUT, STEPS = (4, 6), 10, 3  # CUT splits a row
Optimizer = Callable[..., torch.optim.Optimizer]


def check_elementwise(
    optimizer_cls: Optimizer, options: dict[str, Any], device: torch.device
) -> None:
    """Optimizes a matrix, whole and as two flat slices; raises ValueError if the results differ."""
    # In a separate thread, where no recording or fake-tensor mode is active.
    with ThreadPoolExecutor(1) as thread:
        name, why = thread.submit(_difference, optimizer_cls, options, device).result()
    if why:
        raise ValueError(
            f"{name} cannot be sharded: {why}. ZeRO gives each rank flat slices of the "
            "parameters; use an optimizer class that treats each element independently (SGD, "
            f"Adam, AdamW, RMSprop, Adagrad, ...), or {name} under DDP"
        )


def _difference(
    optimizer_cls: Optimizer, options: dict[str, Any], device: torch.device
) -> tuple[str, str]:
    name = getattr(optimizer_cls, "__name__", type(optimizer_cls).__name__)
    start = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float64, device=device).sin()
    whole = nn.Parameter(start.view(SHAPE).clone())
    pieces = [nn.Parameter(part.clone()) for part in start.tensor_split([CUT])]
    try:
        for parameters in ([whole], pieces):
            optimizer = optimizer_cls([{**options, "params": parameters}])
            name = type(optimizer).__name__  # lambdas and partials have no class name
            group = optimizer.param_groups[0]
            before = deepcopy({key: x for key, x in group.items() if key != "params"})
            for step in range(STEPS):
                gradient = (start * (step + 2)).cos()
                for p, part in zip(parameters, gradient.split([p.numel() for p in parameters])):
                    p.grad = part.view(p.shape).clone()
                optimizer.step()
            for key in group:
                if key != "params" and (key not in before or group[key] != before[key]):
                    return name, (
                        f"its step changes the option {key!r} of the group (counters belong in the "
                        "state of each parameter)"
                    )
    except Exception as error:  # third-party optimizers may raise anything
        return name, f"it failed on slices of a matrix ({error})"
    same = torch.allclose(whole.view(-1), torch.cat([p.view(-1) for p in pieces]), rtol=1e-9)
    return name, "" if same else "its update of a matrix depends on whether the matrix is sliced"
