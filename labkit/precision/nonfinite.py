"""Where NaN or inf begins: in the batch, in a parameter, or in the forward of a module.

    batch -> embedding -> block 0 -> block 1 -> head -> loss = nan
      ?          ?           ?          ?        ?

NaN spreads, in backward to all gradients: what counts is the first place in forward's order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.precision.autocasting import tensors_in


@torch.no_grad()
def find_nonfinite(model: nn.Module, *args: Any, **kwargs: Any) -> str | None:
    """Where `model(*args, **kwargs)` first meets NaN or inf, in a sentence; None where nowhere.

    Looks at arguments, parameters and buffers, then at each module's inputs and outputs in
    forward's order: it runs once, without gradients, and leaves buffers and random numbers as they
    were. Call it inside the autocast region of training, and under a strategy on every rank. A -inf
    in arguments and buffers counts as a mask.

    >>> find_nonfinite(model, tokens)
    'the output of blocks.3.mlp (MLP) has 64 inf among 4096 numbers, the first at [0, 0, 17]; ...'
    """
    found: list[str] = []
    given = {**{f"argument {i}": x for i, x in enumerate(args)}, **kwargs}
    for name, x in given.items():
        if problem := _problem(x, masks=True):
            found.append(f"{name} of the model {problem}; look at the batch, not at the training")
    for name, x in model.named_parameters():
        if problem := _problem(x):
            found.append(
                f"the parameter {name} {problem}; an earlier step has written it: go back to a "
                "checkpoint, and look at the gradients and the learning rate of the steps after it"
            )
    for name, x in model.named_buffers():
        if problem := _problem(x, masks=True):
            found.append(f"the buffer {name} {problem}; make it anew, or go back to a checkpoint")
    parts = model.named_modules()
    hooks = [
        part.register_forward_hook(partial(_look, found, name), with_kwargs=True)
        for name, part in parts
    ]
    try:
        with _as_it_was(model):
            model(*args, **kwargs)  # in any case: other ranks may need this one for it
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    gpus = {x.device for x in [*model.parameters(), *model.buffers()] if x.is_cuda}
    before = [(x, x._version, x.clone()) for x in model.buffers()]
    with torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            for x, version, was in before:
                if x._version != version:  # autograd may have kept the others
                    x.copy_(was)


def _look(
    found: list[str], name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    """A forward hook; it runs for a module's children first."""
    if found:
        return
    where = f"{name} ({type(module).__name__})" if name else type(module).__name__
    if problem := _problem((args, kwargs), masks=True):
        found.append(
            f"the input of {where} {problem}; no module has made it: look at what is computed "
            f"between the call of {where} and that of the module before"
        )
    elif problem := _problem(output):
        found.append(
            f"the output of {where} {problem}; input and parameters are finite: it divides by 0, "
            f"or has left the range of its dtype{_range_of(output)}"
        )


def _range_of(output: Any) -> str:
    kinds = {x.dtype for x in tensors_in(output) if x.is_floating_point()}
    return "".join(
        f" ({str(kind).removeprefix('torch.')} ends at {torch.finfo(kind).max:.3g})"
        for kind in sorted(kinds, key=str)
    )


def _problem(given: Any, masks: bool = False) -> str:
    """Describes the first non-finite tensor; -inf in masks is meant."""
    for x in (x for x in tensors_in(given) if x.is_floating_point()):
        x = x.float() if x.itemsize == 1 else x  # torch has no isinf in 8 bits
        bad = x.isnan() | (x.isposinf() if masks else x.isinf())
        if count := int(bad.sum()):
            kinds = {"NaN": x.isnan(), "inf": bad & x.isinf()}
            names = " or ".join(kind for kind, which in kinds.items() if which.any())
            first = bad.nonzero()[0].tolist()
            return f"has {count} {names} among {x.numel()} numbers, the first at {first}"
    return ""
