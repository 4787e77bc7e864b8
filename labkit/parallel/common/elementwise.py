"""Can an optimizer be sharded? Only if it treats each element of a tensor by itself.

SGD and Adam do: a piece of a matrix steps as it would inside the whole matrix. Adafactor (row and
column means), Muon (an orthogonal matrix) and LBFGS (all gradients at once) do not. There is no
list of names: the optimizer is tried, on a small matrix whole and on the same elements in two flat
pieces, so that a user's own is judged alike.

It must also leave the options of its groups alone: where `step` counts in `group["step"]`, it would
count each bucket, for ZeRO steps bucket by bucket.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from labkit.precision.shadow_optimizer import options_of

SHAPE, CUT, STEPS = (4, 6), 10, 3  # cut within a row


def check_elementwise(
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    device: torch.device,
) -> None:
    """Raises ValueError, naming the optimizer, when its pieces do not do what the whole does."""
    # In a thread of its own: what records this one, or runs it without data, is not there.
    with ThreadPoolExecutor(1) as thread:
        name, why = thread.submit(_difference, optimizer_cls, options, device).result()
    if why:
        raise ValueError(
            f"{name} cannot be sharded: {why}. ZeRO gives each rank flat pieces of the parameters; "
            "give the class of one that treats each element by itself (SGD, Adam, AdamW, RMSprop, "
            f"Adagrad, ...), or {name} under DDP"
        )


def _difference(
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    device: torch.device,
) -> tuple[str, str]:
    """The optimizer's name, and why not; empty where a matrix and its pieces end equal."""
    name = getattr(optimizer_cls, "__name__", type(optimizer_cls).__name__)
    count = SHAPE[0] * SHAPE[1]
    start = torch.arange(count, dtype=torch.float64, device=device).sin()
    whole = nn.Parameter(start.view(SHAPE).clone())
    pieces = [nn.Parameter(part.clone()) for part in start.split([CUT, count - CUT])]
    try:
        for parameters in ([whole], pieces):
            optimizer = optimizer_cls([{**options, "params": parameters}])
            name = type(optimizer).__name__  # a lambda or partial has none of its own
            before = deepcopy(options_of(optimizer.param_groups[0]))
            for step in range(STEPS):
                gradient = (start * (step + 2)).cos()
                for p, part in zip(parameters, gradient.split([p.numel() for p in parameters])):
                    p.grad = part.view(p.shape).clone()
                optimizer.step()
            after = options_of(optimizer.param_groups[0])
            changed = [key for key in after if key not in before or after[key] != before[key]]
            if changed:
                return name, (
                    f"its step changes the option {changed[0]!r} of the group (what it counts "
                    "belongs into the state of each parameter)"
                )
    except Exception as error:  # of any kind: it is somebody's optimizer
        return name, f"it failed when it was tried on pieces of a matrix ({error})"
    if torch.allclose(whole.detach().view(-1), torch.cat([p.detach() for p in pieces]), rtol=1e-9):
        return name, ""
    return name, "on two pieces of a matrix it steps otherwise than on the whole"
