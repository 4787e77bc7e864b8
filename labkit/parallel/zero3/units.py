"""Which parameters ZeRO-3 gathers together: the units of a module, and what they cost.

    GPT
      embed.tokens     one unit with the head, which has the same weight
      embed.positions  a unit
      blocks           a list: each of its entries is a unit
      norm             a unit
      head             see above

A unit is the module that is called: its parameters, and those of all modules inside, are gathered
before its forward. What belongs to no block is a unit of the module that owns it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.flat import FlatPartition
from labkit.parallel.common.footprint import Footprint
from labkit.parallel.common.replicas import register_grad_ready_hook
from labkit.parallel.zero3.flat import Flat, Place, Unit, compute_dtype_of, master_dtype_of
from labkit.parallel.zero3.tensors import UngatheredParameter
from labkit.parallel.zero3.validation import check_called_inside_unit

Choice = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
Sharing = tuple[nn.Parameter, list[Place]]  # a parameter and all its places


@dataclass
class Group:
    """Parameters of one unit, and the modules that use them."""

    members: list[nn.Module]
    parameters: list[Sharing]


def group_parameters(root: nn.Module, units: Choice | None) -> list[Group]:
    """The units of a module, in the order of its parameters."""
    places: dict[int, Sharing] = {}
    for parameter, place in _walk(root, "", root, None, False, _chooser(units)):
        places.setdefault(id(parameter), (parameter, []))[1].append(place)
    groups: dict[frozenset[int], Group] = {}
    for parameter, found in places.values():
        members = list(dict.fromkeys(place.unit for place in found))
        if len(members) > 1:  # tied across units: it comes and goes with the layers that have it
            members = list(dict.fromkeys(place.owner for place in found))
        key = frozenset(map(id, members))
        groups.setdefault(key, Group(members, [])).parameters.append((parameter, found))
    return list(groups.values())


def _walk(
    module: nn.Module, name: str, owner: nn.Module, unit: nn.Module | None, listed: bool,
    chosen: Callable[[nn.Module, bool], bool],
) -> Iterator[tuple[nn.Parameter, Place]]:  # fmt: skip
    """Every place of every parameter; `listed` says that the module is an entry of a list."""
    can_be_called = type(module).forward is not nn.Module.forward
    owner = module if can_be_called else owner
    if unit is None and can_be_called and chosen(module, listed):
        unit = module
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            full_name = f"{name}{attribute}"
            yield parameter, Place(full_name, module, attribute, owner, unit or owner)
    lists = _is_list(module) or (listed and not can_be_called)
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{name}{child_name}.", owner, unit, lists, chosen)


def _is_list(module: nn.Module) -> bool:
    """Also what has its parts under numbers, as a stage of `split` has those of a list."""
    numbered = bool(module._modules) and all(name.isdecimal() for name in module._modules)
    return numbered or isinstance(module, (nn.ModuleList, nn.Sequential))


def _chooser(units: Choice | None) -> Callable[[nn.Module, bool], bool]:
    """By default the entries of the outermost lists; attention of torch, which uses the weights
    of a layer inside without calling it."""
    if units is None:
        return lambda module, listed: listed or isinstance(module, nn.MultiheadAttention)
    if isinstance(units, (type, tuple)):
        return lambda module, _: isinstance(module, units)
    return lambda module, _: units(module)


def units_of(
    root: nn.Module, comm: Comm, choice: Choice | None, persist_below: int,
    compute_dtype: torch.dtype | None,
) -> list[Unit]:  # fmt: skip
    """Shard the parameters of a module, one unit after the other: only the present one is whole."""
    groups, units = group_parameters(root, choice), []
    while groups:  # nobody holds on to what is sharded
        group = groups.pop(0)
        kinds = _kinds(group, persist_below)
        members, flats = group.members, []
        del group
        while kinds:
            keep_whole, kind = kinds.pop(0)
            flats.append(Flat(kind, comm, keep_whole, compute_dtype))
            del kind
        units.append(Unit(members, flats))
    return units


def register_hooks(unit: Unit, strategy: Any) -> None:
    """Have `strategy`, a ZeRO3, called before and after the unit computes, and when the gradient of
    a parameter is there."""
    for member in unit.members:
        before = partial(strategy._before_forward, unit)
        member.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        member.register_forward_hook(partial(strategy._after_forward, unit))
    inside: dict[nn.Module, str] = {}
    for place in (place for flat in unit.flats for places in flat.places for place in places):
        inside.setdefault(place.module, place.name)
    for module, name in inside.items():
        if module not in unit.members:
            module.register_forward_pre_hook(partial(_check_gathered, strategy, unit, name))
    for flat in unit.trainable:
        for parameter in flat.gathered:
            strategy._flat_of[parameter] = unit, flat
            register_grad_ready_hook(parameter, strategy._on_grad_ready)
    for flat in unit.flats:
        gather = partial(strategy._use, unit, stays=True)
        flat.ungathered = [UngatheredParameter(x, gather) for x in flat.gathered]


def _check_gathered(strategy: Any, unit: Unit, name: str, module: nn.Module, args: Any) -> None:
    """Before the forward of a module inside a unit, whose parameter `name` is gathered with it."""
    if not unit.is_gathered:
        check_called_inside_unit(unit, name, module)
        strategy._use(unit)


def _kinds(group: Group, persist_below: int) -> list[tuple[bool, list[Sharing]]]:
    """The parameters by what must be equal in one flat memory, and whether they are kept whole."""
    kinds: dict[object, tuple[bool, list[Sharing]]] = {}
    for parameter, places in group.parameters:
        keep_whole = parameter.numel() < persist_below
        key = parameter.dtype, parameter.device, parameter.requires_grad, keep_whole
        kinds.setdefault(key, (keep_whole, []))[1].append((parameter, places))
    return list(kinds.values())


def predict(
    module: nn.Module, size: int, units: Choice | None = None, persist_below: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> Footprint:  # fmt: skip
    """The mean of the ranks. 1/n of everything; each unit gathered once in forward and once in
    backward, and its gradients reduced once, of every flat memory with its padding."""
    parameters, gradients, optimizer, sent = 0, 0, 0, 0  # bytes of all ranks together
    for group in group_parameters(module, units):
        for keep_whole, kind in _kinds(group, persist_below):
            first, copies = kind[0][0], size if keep_whole else 1
            cut = FlatPartition([p.shape for p, _ in kind], 1 if keep_whole else size)
            held = cut.numel * master_dtype_of(first, compute_dtype).itemsize * copies
            moved = cut.padded * compute_dtype_of(first, compute_dtype).itemsize * (size - 1)
            parameters += held
            sent += 0 if keep_whole else 2 * moved
            if first.requires_grad:
                pieces = sum(len(list(cut.pieces(rank))) for rank in range(cut.ranks))
                gradients += held
                optimizer += 2 * held + 4 * pieces * copies  # Adam counts the steps of each piece
                sent += 2 * moved if keep_whole else moved
    return Footprint(parameters / size, gradients / size, optimizer / size, sent / size)
