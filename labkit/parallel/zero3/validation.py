"""Rejects models that ZeRO-3 cannot shard and optimizers that cannot step on shards."""

from collections.abc import Iterable
from functools import cache, partial, update_wrapper
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labkit.parallel.common.elementwise import check_elementwise
from labkit.parallel.common.ownership import (
    check_same_on_all_ranks,
    check_trainable,
    claim,
    owner_of,
)
from labkit.parallel.zero3.flat import Flat, refuse_hook
from labkit.parallel.zero3.state import WholeState


def check_module(strategy: Any, prefetch: int, persist_below: int) -> None:
    """Raises ValueError if `strategy.module` cannot be sharded or differs between ranks."""
    module: nn.Module = strategy.module
    if prefetch < 0 or persist_below < 0:
        raise ValueError(f"prefetch={prefetch}, persist_below={persist_below}: choose 0 or more")
    for name, parameter in module.named_parameters():
        if parameter.is_meta and not hasattr(parameter, "whole"):
            raise ValueError(
                f"{name} is on the meta device, without values; build the module inside `with "
                "ZeRO3.init(comm):`, or call to_empty and initialize the weights"
            )
        hooks = (parameter._post_accumulate_grad_hooks or {}).values()
        functions = [getattr(hook, "func", hook) for hook in hooks]  # unwraps labkit's hooks
        if not all(getattr(x, "__module__", "").startswith("labkit.") for x in functions):
            refuse_hook()
    if any(hasattr(x, "_orig_mod") or x._compiled_call_impl for x in module.modules()):
        raise ValueError("ZeRO3: compiled code does not gather shards; wrap the plain module")
    claim(module.named_parameters(), strategy)
    check_same_on_all_ranks(list(module.named_parameters()), strategy.comm)
    check_trainable(module)


def check_first_order() -> None:
    """Raises ValueError for backward with create_graph=True."""
    if torch.is_grad_enabled():
        raise ValueError(
            "ZeRO3: create_graph=True needs a graph of the backward pass, which needs weights "
            "that are already freed; use DDP for second derivatives"
        )


def check_unwritten(flats: Iterable[Flat]) -> None:
    """Raises ValueError if forward wrote to a gathered parameter."""
    for p, places in (pair for flat in flats for pair in zip(flat.gathered, flat.places)):
        if p._version:
            raise ValueError(
                f"ZeRO3: forward wrote to {places[0].name}, and the change would be lost, since "
                "only shards are kept; compute a new tensor instead, or write to shards after a "
                "step"
            )


_owners_of: WeakKeyDictionary[torch.optim.Optimizer, WeakSet[Any]] = WeakKeyDictionary()


@cache
def check_optimizers() -> None:
    """Installs a global hook that checks every optimizer that steps on shards."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _owners_of.get(optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        owners = WeakSet(x for x in map(owner_of, params) if isinstance(x, WholeState))
        if not owners:
            return
        shards = {shard for owner in owners for _, shard in owner._named}
        if any(isinstance(owner_of(p), WholeState) and p not in shards for p in params):
            raise ValueError(
                "ZeRO3: this optimizer has parameters from before ZeRO3(module) was called, so "
                "its steps would change nothing; create it afterward, from model.parameters()"
            )
        kind, accepted = type(optimizer), signature(type(optimizer)).parameters
        defaults = {name: x for name, x in optimizer.defaults.items() if name in accepted}
        constructor: Any = update_wrapper(partial(kind, **defaults), kind)
        for group in optimizer.param_groups:
            options = {key: x for key, x in group.items() if "param" not in key}
            check_elementwise(constructor, options, params[0].device)
        # Makes torch's scaler set `found_inf` and call step even where it would skip the step.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        _owners_of[optimizer] = owners
    if hasattr(optimizer, "found_inf"):
        raise ValueError(
            "ZeRO3: torch.amp.GradScaler checks only this rank's shards for infs, so one rank "
            "could skip a step that others take; use labkit.GradScaler, which decides for "
            "all ranks, or train in bfloat16, which needs no loss scaling"
        )
    has_closure = any(map(callable, (*args, *kwargs.values())))
    for owner in () if has_closure else _owners_of[optimizer]:
        if owner.awaits_gradients and all(shard.grad is None for _, shard in owner._named):
            raise ValueError(
                "ZeRO3: no gradient has arrived since the last forward, so this step would change "
                "nothing; call loss.backward() first, without inputs=, which cannot name shards"
            )
