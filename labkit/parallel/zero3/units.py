"""Units, the groups of parameters that ZeRO-3 gathers together, and their predicted cost.

    GPT     embed.tokens, head                 one unit, since they share a weight
            embed.positions; norm              one unit per module
            blocks                             a list: one unit per entry

A unit gathers the parameters of its modules and submodules before their forward. Parameters outside
lists form one unit per owning module.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit.comm import Comm, Handle
from labkit.holdings import Footprint
from labkit.parallel.common.flat import FlatPartition, register_grad_ready_hook
from labkit.parallel.common.ownership import running_backward
from labkit.parallel.zero3.flat import Flat, Place, compute_dtype_of, master_dtype_of

UnitPolicy = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
Placed = tuple[nn.Parameter, list[Place]]  # a parameter and all its places
Group = tuple[list[nn.Module], list[Placed]]  # a unit's members and their parameters
NAMES = "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"
METADATA = {getattr(Tensor, name).__get__ for name in NAMES}
METADATA |= {Tensor.size, Tensor.dim, Tensor.numel}


class Unit:
    """Modules whose parameters are gathered before forward and backward, and freed afterward."""

    def __init__(self, members: list[nn.Module], flats: list[Flat]):
        self.members, self.flats = members, flats
        self.trainable = [flat for flat in flats if flat.trainable]
        self.has_frozen = len(self.trainable) < len(flats)
        self.frees_itself = False  # whether the final gradient freed the unit in the last backward
        self.inputs = self.inputs_back = 0  # inputs of the last forward; input gradients so far
        self.has_run: set[nn.Module] = set()  # members run since the last gather
        self.awaited: set[Flat] = set()  # flats with gradients still expected in this backward
        self.is_gathered = False  # gathered and installed in the modules
        self.keep_gathered = False  # until the end of the pass, for use outside the unit
        self._handles: list[Handle | None] | None = None

    def start_gather(self, async_op: bool) -> None:
        if self._handles is None:  # neither gathered nor in flight
            self._handles = [flat.gather(async_op) for flat in self.flats]

    def finish_gather(self) -> None:
        self._wait()
        for flat in self.flats:
            flat.install(flat.gathered)
        self.is_gathered = True

    def _wait(self) -> None:
        for handle in self._handles or ():
            if handle is not None:
                handle.wait()

    def free(self) -> None:
        if self._handles is None or self.keep_gathered:
            return
        self._wait()  # for a gather in flight
        for flat in self.flats:
            if self.is_gathered:
                flat.install(flat.resting)
            flat.full.free()
        self._handles, self.is_gathered = None, False
        self.has_run.clear()

    def on_input_grad(self, gradient: Tensor) -> None:
        """Frees the unit on the last input gradient, when the unit's backward is complete."""
        self.inputs_back += 1
        if self.inputs_back >= self.inputs:
            self.free()

    def end_pass(self) -> None:
        self.keep_gathered = False
        self.free()
        self.rest(in_pass=False)
        self.inputs_back = 0
        if self.awaited:  # some parameters were unused
            self.frees_itself = False
            self.awaited.clear()

    def rest(self, in_pass: bool) -> None:
        for flat in self.flats:
            flat.resting = flat.ungathered if in_pass else flat.shards
            if not self.is_gathered:
                flat.install(flat.resting)


class UngatheredParameter(Tensor):
    """Placeholder during a pass: an operation outside the unit's forward, such as a head's
    `F.linear(x, self.embedding.weight)`, gathers the unit first."""

    _is_param = True  # so that torch treats a subclass as an nn.Parameter

    def __new__(cls, parameter: Tensor, gather_unit: Callable[[], None]) -> Any:
        self: Any = Tensor._make_wrapper_subclass(cls, (0,))
        self.parameter, self.gather_unit = parameter, gather_unit
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in () if func in METADATA else tree_leaves((args, kwargs)):
            if hasattr(x, "gather_unit"):
                x.gather_unit()
        args, kwargs = tree_map_only(cls, lambda x: x.parameter, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func}: an ungathered parameter has no elements")


def group_parameters(root: nn.Module, choice: UnitPolicy | None) -> list[Group]:
    """Groups the parameters of a module into units, in parameter order."""
    places: dict[int, Placed] = {}
    for parameter, place in _walk(root, "", root, None, False, _chooser(choice)):
        places.setdefault(id(parameter), (parameter, []))[1].append(place)
    groups: dict[frozenset[int], Group] = {}
    for placed in places.values():
        members = list(dict.fromkeys(place.unit for place in placed[1]))
        if len(members) > 1:  # tied across units: gathered for each owning layer
            members = list(dict.fromkeys(place.owner for place in placed[1]))
        groups.setdefault(frozenset(map(id, members)), (members, []))[1].append(placed)
    return list(groups.values())


def _walk(
    module: nn.Module, name: str, owner: nn.Module, unit: nn.Module | None, listed: bool,
    chosen: Callable[[nn.Module, bool], bool],
) -> Iterator[tuple[nn.Parameter, Place]]:  # fmt: skip
    """Every place of every parameter; `listed`: whether `module` is a list entry."""
    can_be_called = type(module).forward is not nn.Module.forward
    owner = module if can_be_called else owner
    if unit is None and can_be_called and chosen(module, listed):
        unit = module
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield parameter, Place(f"{name}{attribute}", module, attribute, owner, unit or owner)
    lists = _is_list(module) or (listed and not can_be_called)
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{name}{child_name}.", owner, unit, lists, chosen)


def _is_list(module: nn.Module) -> bool:
    """True for lists and for modules with numbered children, such as a stage from `split`."""
    numbered = bool(module._modules) and all(name.isdecimal() for name in module._modules)
    return numbered or isinstance(module, (nn.ModuleList, nn.Sequential))


def _chooser(choice: UnitPolicy | None) -> Callable[[nn.Module, bool], bool]:
    """Returns the predicate for units: by default, entries of the outermost lists and
    nn.MultiheadAttention, which uses a submodule's weights without calling the submodule."""
    if choice is None:
        return lambda module, listed: listed or isinstance(module, nn.MultiheadAttention)
    if isinstance(choice, (type, tuple)):
        return lambda module, _: isinstance(module, choice)
    return lambda module, _: choice(module)


def units_of(
    root: nn.Module, comm: Comm, choice: UnitPolicy | None, persist_below: int,
    compute_dtype: torch.dtype | None,
) -> list[Unit]:  # fmt: skip
    """Shards a module unit by unit; frees whole parameters before sharding the next unit."""
    groups, units = group_parameters(root, choice), []
    while groups:  # drop references, so that parameters are freed once sharded
        members, parameters = groups.pop(0)
        kinds, flats = _kinds(parameters, persist_below), []
        del parameters
        while kinds:
            keep_whole, kind = kinds.pop(0)
            flats.append(Flat(kind, comm, keep_whole, compute_dtype))
            del kind
        units.append(Unit(members, flats))
    return units


def _kinds(parameters: list[Placed], persist_below: int) -> list[tuple[bool, list[Placed]]]:
    kinds: dict[object, tuple[bool, list[Placed]]] = {}
    for placed in parameters:
        p, keep_whole = placed[0], placed[0].numel() < persist_below
        key = p.dtype, p.device, p.requires_grad, keep_whole
        kinds.setdefault(key, (keep_whole, []))[1].append(placed)
    return list(kinds.values())


def register_hooks(unit: Unit, strategy: Any) -> None:
    """Registers the hooks of `strategy` (a ZeRO3) on the modules and parameters of `unit`."""
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
        gather = partial(strategy._use, unit, keep_gathered=True)
        flat.ungathered = [UngatheredParameter(x, gather) for x in flat.gathered]


def _check_gathered(strategy: Any, unit: Unit, name: str, module: nn.Module, args: Any) -> None:
    if unit.is_gathered:
        return
    if running_backward() is None:  # in backward, forward is being recomputed
        inner, outer = type(module).__name__, type(unit.members[0]).__name__
        raise ValueError(
            f"{name} is sharded: its {inner} was called outside the forward of the {outer} "
            f"with which it is gathered; call the {outer}, or make the {inner} a unit (`units=`)"
        )
    strategy._use(unit)


def predict(
    module: nn.Module, size: int, units: UnitPolicy | None = None, persist_below: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> Footprint:  # fmt: skip
    """Mean bytes per rank: 1/n of sharded state; two gathers and one reduction per unit."""
    parameters, gradients, optimizer, sent = 0, 0, 0, 0  # bytes, summed over ranks
    groups = (_kinds(group, persist_below) for _, group in group_parameters(module, units))
    for keep_whole, kind in (kind for kinds in groups for kind in kinds):
        first, copies = kind[0][0], size if keep_whole else 1
        cut = FlatPartition([p.shape for p, _ in kind], 1 if keep_whole else size)
        held = cut.numel * master_dtype_of(first, compute_dtype).itemsize * copies
        moved = cut.padded * compute_dtype_of(first, compute_dtype).itemsize * (size - 1)
        parameters += held
        sent += 0 if keep_whole else 2 * moved
        if first.requires_grad:
            pieces = sum(len(list(cut.pieces(rank))) for rank in range(cut.ranks))
            gradients += held
            optimizer += 2 * held + 4 * pieces * copies  # 4: Adam's step count per piece
            sent += 2 * moved if keep_whole else moved
    return Footprint(parameters / size, gradients / size, optimizer / size, sent / size)
