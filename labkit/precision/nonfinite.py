"""Find where NaN or inf begins: in the batch, in a parameter, or in a module's forward.

    batch -> embedding -> block 0 -> block 1 -> head -> loss = nan
      ?          ?           ?          ?        ?

NaN spreads (in backward, to all gradients), so only the first occurrence in forward matters.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.precision.autocasting import tensors_in


@torch.no_grad()
def find_nonfinite(model: nn.Module, *args: Any, **kwargs: Any) -> str | None:
    """Describe the first NaN or inf in `model(*args, **kwargs)`, or return None if there is none.

    Checks arguments, parameters and buffers, then each module's inputs and outputs in one forward
    without gradients; restores buffers and random state. Call it in the autocast region of training
    and, under a strategy, on every rank. In inputs and buffers, -inf is allowed, as in a mask.

    >>> find_nonfinite(model, tokens)
    'the output of blocks.3.mlp (MLP) has 64 inf among 4096 elements, the first at [0, 0, 17]; ...'
    """
    problems: list[str] = []

    def check(place: str, value: Any, advice: str, masks: bool = False) -> None:
        if not problems and (problem := _problem(value, masks)):
            problems.append(f"{place} {problem}; {advice}")

    def check_call(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        between_modules = (
            f"no module computed it: look at the code between the previous module and {where}"
        )
        check(f"the input of {where}", (args, kwargs), between_modules, masks=True)
        in_module = (
            f"it begins in this module: look for overflow{_range_of(output)}, a division by 0, "
            "log(0) or a fully masked row"
        )
        check(f"the output of {where}", output, in_module)

    for name, x in {**{f"argument {i}": x for i, x in enumerate(args)}, **kwargs}.items():
        check(f"{name} of the model", x, "check the batch, not the training loop", masks=True)
    for name, x in model.named_parameters():
        check(
            f"the parameter {name}", x,
            "an earlier step wrote it: go back to a checkpoint, and check the gradients and the "
            "learning rate of the steps since then",
        )  # fmt: skip
    for name, x in model.named_buffers():
        check(f"the buffer {name}", x, "recreate it, or go back to a checkpoint", masks=True)
    with ExitStack() as stack:
        for name, part in model.named_modules():
            hook = part.register_forward_hook(partial(check_call, name), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(_restored(model))
        model(*args, **kwargs)  # even if a check failed: other ranks may wait for this rank
    return problems[0] if problems else None


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    gpus = {x.device for x in [*model.parameters(), *model.buffers()] if x.is_cuda}
    before = [(x, x._version, x.clone()) for x in model.buffers()]
    with torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            for x, version, saved in before:
                if x._version != version:  # autograd may have saved unchanged buffers
                    x.copy_(saved)


def _range_of(output: Any) -> str:
    kinds = {x.dtype for x in tensors_in(output) if x.is_floating_point()}
    return "".join(
        f" ({str(kind).removeprefix('torch.')} ends at {torch.finfo(kind).max:.3g})"
        for kind in sorted(kinds, key=str)
    )


def _problem(nested: Any, masks: bool = False) -> str:
    for x in (x for x in tensors_in(nested) if x.is_floating_point()):
        x = x.float() if x.itemsize == 1 else x  # torch has no isinf for 8-bit dtypes
        bad = x.isnan() | (x.isposinf() if masks else x.isinf())
        if count := int(bad.sum()):
            kinds = {"NaN": x.isnan(), "inf": bad & x.isinf()}
            names = " or ".join(kind for kind, which in kinds.items() if which.any())
            first = bad.nonzero()[0].tolist()
            return f"has {count} {names} among {x.numel()} elements, the first at {first}"
    return ""
