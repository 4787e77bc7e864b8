"""ZeRO stage 3: parameters, gradients and optimizer state are sharded; a layer's parameters are
whole only while it computes.

    each rank holds   16 P/n bytes in mixed precision with Adam (master 4, gradient 4, moments 8),
                      and the working set: the unit that computes and the one that comes next
    travels           (2c + g) P (n-1)/n bytes from each rank and step: two all-gathers in the
                      compute dtype (c bytes an element), one reduce-scatter of gradients (g bytes,
                      the compute dtype, too). P with the padding of each unit to n equal shares.

The module is cut into units, each block of a list being one. On every rank, with prefetch=1:

    compute    |  unit 0  |  unit 1  |  unit 2  | bwd 2 (last gradient) | bwd 1 | ...
    gather     0 |   1    |    2     |          | 2 |      1            |   0
    free                  0          1          2                       2       1
    reduce                                                              |  2  |  1

In forward a unit is gathered by a hook before it, and freed by one behind it. In backward a hook on
the gradient of its output gathers it again; when the gradients of all its parameters are there,
they leave in one reduce-scatter, and parameters and gradients are freed at once. Where some
parameters are frozen, they may be needed after the last gradient, and where some are not used, a
last one never comes: such a unit is freed when the gradients of its inputs are there (that of an
input that needs none: at the end). The order of the units is noted in every pass, so that in the
next one a gather can leave `prefetch` units early.

A unit with several members, as a head that is tied to the embedding, stays from the first member's
forward to the last one's: it too is gathered once, but stands in memory beside the two others.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, sections 5.3 and 7.2.2; prefetch: "ZeRO-
Infinity", arXiv 2104.07857, section 6.2; units and hooks: Zhao et al., "PyTorch FSDP", arXiv
2304.11277, section 3.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from labkit.comm import Comm
from labkit.parallel.common.agreement import ParamSnapshot, check_same_on_all_ranks, claim
from labkit.parallel.common.replicas import (
    at_end_of_backward,
    copy_from_rank_0,
    register_grad_ready_hook,
    running_backward,
    trainable,
)
from labkit.parallel.zero3.flat import Flat, Unit
from labkit.parallel.zero3.optimizers import check_optimizers
from labkit.parallel.zero3.passes import (
    Order,
    SavedParameters,
    cast,
    tensors_in,
    watch_inputs,
    watch_outputs,
)
from labkit.parallel.zero3.sharded_init import sharded_init
from labkit.parallel.zero3.state import WholeState
from labkit.parallel.zero3.tensors import UngatheredParameter, refuse_hook
from labkit.parallel.zero3.units import Choice, predict, units_of

REDUCES_IN_FLIGHT = 2  # each holds the gradients of a whole unit


class ZeRO3(WholeState, nn.Module):
    """`module` with its parameters sharded over the ranks, gathered where and while they are used.

    Args:
        module: any module; all ranks start with rank 0's weights.
        comm: the ranks that share it; all by default.
        units: what is gathered together: a class or classes of modules, or a function module ->
            bool. By default the entries of the outermost ModuleLists and Sequentials. A module
            outside of them that has parameters itself is a unit, too.
        persist_below: parameters with fewer elements stay whole on every rank; their gradients are
            all-reduced at the end of backward.
        prefetch: so many units are gathered ahead; 0: each one when it is needed.
        compute_dtype: of the gathered parameters and travelling gradients; what the optimizer has
            stays float32 then. By default that of the module.

    `parameters()` are this rank's pieces, flat, under the names of the whole ones: make the
    optimizer of them, after wrapping. It must treat every element by itself, as SGD and Adam do;
    its first step refuses one that does not. Being flat, all have one dimension: group them by
    name, not by `p.ndim`, to decay matrices only. Clip with `clip_grad_norm_` of the model. All
    ranks use the same units in the same order. Scale losses with labkit.GradScaler. torch.compile
    leaves the model as it is. Not supported: torch.amp.GradScaler (refused at an optimizer's
    second step at the latest) and second derivatives.
    """

    init = staticmethod(sharded_init)  # `with ZeRO3.init(comm):` no rank holds the whole model

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        units: Choice | None = None,
        persist_below: int = 0,
        prefetch: int = 1,
        compute_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if prefetch < 0 or persist_below < 0:
            raise ValueError(f"prefetch={prefetch}, persist_below={persist_below}: 0 or more")
        trainable(module)
        self.module, self.comm, self.prefetch = module, Comm.of(comm), prefetch
        self.compute_dtype, self.peak_gathered_bytes = compute_dtype, 0
        named = list(module.named_parameters())
        for name, parameter in named:
            if parameter.is_meta and not hasattr(parameter, "whole"):
                raise ValueError(
                    f"{name} is on the meta device, where it has no numbers; build the module in a "
                    "block `with ZeRO3.init(comm):`, or call its to_empty and draw its weights"
                )
            hooks = (parameter._post_accumulate_grad_hooks or {}).values()
            if any(
                getattr(x, "__module__", "") != register_grad_ready_hook.__module__ for x in hooks
            ):
                refuse_hook()
        if any(hasattr(x, "_orig_mod") or x._compiled_call_impl for x in module.modules()):
            raise ValueError("ZeRO3: compiled code does not gather shards; wrap the plain module")
        claim(named, self)
        check_same_on_all_ranks(named, self.comm)
        self._shapes = {name: p.shape for name, p in named}
        del named
        self.units = units_of(module, self.comm, units, persist_below, compute_dtype)
        self._flats = [flat for unit in self.units for flat in unit.flats]
        claim(module.named_parameters(), self)  # the shards, which now stand there
        check_optimizers()
        copy_from_rank_0(module.buffers(), self.comm)
        self._unchanged = ParamSnapshot(module)
        self._named = list(module.named_parameters())
        self._flat_of: dict[torch.Tensor, tuple[Unit, Flat]] = {}
        self._orders = {False: Order(), True: Order()}  # of forward, of backward
        self._pending: dict[int, dict[Flat, Unit]] = {}  # backward -> whose gradients have not left
        self._noted: dict[int, set[Unit]] = {}  # backward -> units that have taken part
        self._leaving: deque[Flat] = deque()
        self._in_forward = False
        self._saved_parameters = SavedParameters(self.units, self._use)
        for unit in self.units:
            self._hook(unit)

    def _hook(self, unit: Unit) -> None:
        for member in unit.members:
            member.register_forward_pre_hook(
                partial(self._before_forward, unit), prepend=True, with_kwargs=True
            )
            member.register_forward_hook(partial(self._after_forward, unit))
        inside: dict[nn.Module, str] = {}
        for place in (place for flat in unit.flats for places in flat.places for place in places):
            inside.setdefault(place.module, place.name)
        for module, name in inside.items():
            if module not in unit.members:
                module.register_forward_pre_hook(partial(self._check_gathered, unit, name))
        for flat in unit.trainable:
            for parameter in flat.gathered:
                self._flat_of[parameter] = unit, flat
                register_grad_ready_hook(parameter, self._on_grad_ready)
        for flat in unit.flats:
            gather = partial(self._use, unit, stays=True)
            flat.ungathered = [UngatheredParameter(x, gather) for x in flat.gathered]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces, under the names that their parameters have in the module."""
        for name, shard in self._named:
            if shard.numel():
                yield (f"{prefix}.{name}" if prefix else name), shard

    def _apply(self, *_: Any, **__: Any) -> "ZeRO3":
        raise ValueError(
            "ZeRO3: the shards stay what and where they are; move or convert the module first, "
            "then wrap it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """`copy.deepcopy` comes here, too; it would read parameters whose memory is freed."""
        raise ValueError(
            "ZeRO3: each rank has only shards, so the model cannot be copied or pickled; save its "
            "full_state_dict(), or load that into a second ZeRO3 with load_full_state_dict()"
        )

    # --- forward ---

    @_disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if running_backward() is not None:  # activations are computed again
            return self.module(*args, **kwargs)
        self._clean_up()
        self._unchanged.check()
        if self.training and torch.is_grad_enabled():
            copy_from_rank_0(self.module.buffers(), self.comm)
        if self.compute_dtype is not None:
            args, kwargs = cast((args, kwargs), self.compute_dtype)
        self._orders[False].begin_pass()
        self._in_forward, self.awaits_gradients = True, torch.is_grad_enabled()
        for unit in self.units:
            unit.rest(in_pass=True)
        try:
            with self._saved_parameters.come_back():
                output = self.module(*args, **kwargs)
        finally:
            self._in_forward = False
        self._free_all()
        for p, places in (pair for flat in self._flats for pair in zip(flat.gathered, flat.places)):
            if p._version:
                raise ValueError(
                    f"ZeRO3: forward wrote to {places[0].name}, which would not last, as "
                    "only shards do; compute a new tensor there, or write to shards after a step"
                )
        for x in tensors_in(output):
            if x.requires_grad and torch.is_grad_enabled():
                x.register_hook(lambda _: self._note_backward(running_backward() or 0))
        if not (self.training and torch.is_grad_enabled()):
            self.comm.compare_calls()  # of training, at the end of backward
        return output

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._use(unit)
        if unit.frees_itself or running_backward() is not None or not torch.is_grad_enabled():
            return None
        inputs, watched = watch_inputs(args, kwargs, partial(self._after_backward, unit))
        unit.inputs += max(1, inputs)  # a call without any is over with backward only
        return watched

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if running_backward() is not None:
            return  # backward is about to use it
        if torch.is_grad_enabled():
            watch_outputs(output, partial(self._before_backward, unit))
        unit.has_run.add(module)
        found = (x.untyped_storage() for x in tensors_in(output) if x.layout == torch.strided)
        units = self._saved_parameters.unit_of_memory
        unit.stays |= any(units.get(memory._cdata) is unit for memory in found)
        if not self._in_forward or len(unit.has_run) == len(unit.members):
            unit.free()

    def _check_gathered(self, unit: Unit, name: str, module: nn.Module, args: Any) -> None:
        if unit.is_gathered:
            return
        if running_backward() is None:
            raise ValueError(
                f"{name} is sharded: its {type(module).__name__} was called outside of the forward "
                f"of the {type(unit.members[0]).__name__} with which it is gathered; call that, or "
                "make it a unit of its own (`units=`)"
            )
        self._use(unit)

    # --- what both passes do ---

    def _use(self, unit: Unit, stays: bool = False) -> None:
        """Have the unit here, to the end of the pass if it `stays`, and those that come next on
        their way."""
        unit.stays |= stays
        task = running_backward()
        if task is not None:
            self._note_backward(task, unit)
        if unit.is_gathered:
            return
        unit.start_gather(async_op=False)
        unit.finish_gather()
        order = self._orders[task is not None]
        order.note(unit)
        for coming in order.coming(self.prefetch):
            coming.start_gather(async_op=True)
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, self.gathered_bytes)

    @property
    def gathered_bytes(self) -> int:
        """Of gathered parameters (not of those kept whole), now; `peak_gathered_bytes`: the most
        since one set it to 0."""
        return sum(flat.full.held_bytes for flat in self._flats if not flat.keep_whole)

    # --- backward ---

    def _note_backward(self, task: int, unit: Unit | None = None) -> None:
        """A backward has begun, or `unit` takes part in it."""
        if task not in self._pending:
            self._pending[task] = {}
            for other in self.units:
                other.rest(in_pass=True)
            at_end_of_backward(partial(self._finish_backward, task))
            self._noted[task] = set()
        if unit and not (unit.awaited or unit.is_gathered or unit in self._noted[task]):
            self._noted[task].add(unit)
            unit.awaited = set(unit.trainable)
            self._pending[task].update(dict.fromkeys(unit.trainable, unit))

    def _before_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise ValueError(
                "ZeRO3: create_graph=True asks for a graph of backward itself, which would need "
                "weights that are freed by then; train with second derivatives under DDP"
            )
        self._use(unit)

    def _on_grad_ready(self, parameter: torch.Tensor) -> None:
        """Called by autograd when it has finished the gradient of a gathered parameter."""
        unit, flat = self._flat_of[parameter]
        self.awaits_gradients = False
        flat.take_gradient(parameter)
        if flat.gradients.missing:
            return
        if not flat.keep_whole:
            self._reduce(flat, async_op=True)
        unit.awaited.discard(flat)
        if not unit.awaited and not unit.has_frozen:  # of which backward may yet need some
            unit.frees_itself = True
            unit.free()

    def _after_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        """The gradient of an input of the unit is there. With the last one all that the unit did in
        forward is undone: autograd goes back in the order of forward."""
        unit.inputs_back += 1
        if unit.inputs_back >= unit.inputs:
            unit.free()

    def _reduce(self, flat: Flat, async_op: bool) -> None:
        for pending in self._pending.values():
            pending.pop(flat, None)
        while len(self._leaving) >= REDUCES_IN_FLIGHT:
            self._leaving.popleft().receive_gradients()
        flat.send_gradients(async_op)
        self._leaving.append(flat)

    def _finish_backward(self, task: int) -> None:
        """Backward is over: send the gradients of units that miss some, and wait for all."""
        for flat in list(self._pending[task]):
            self._reduce(flat, async_op=False)
        while self._leaving:
            self._leaving.popleft().receive_gradients()
        del self._pending[task], self._noted[task]
        if not self._pending:
            self._free_all()
            self._orders[True].begin_pass()
            self.comm.compare_calls()

    def _free_all(self) -> None:
        for unit in self.units:
            unit.stays = False
            unit.free()
            unit.rest(in_pass=False)
            unit.inputs_back = 0
            if unit.awaited:  # some parameter was not used
                unit.frees_itself = False
                unit.awaited.clear()

    def _clean_up(self) -> None:
        """What an error has left of the last pass."""
        self._free_all()
        for unit in self.units:
            unit.inputs = 0
        if self._pending:
            for flat in self._flats:
                flat.reset()
            for left in (self._pending, self._noted, self._leaving):
                left.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For loops that accumulate: every backward adds to the shards' gradients, as in one
        process. Nothing is held back, since that would need the memory of whole gradients."""
        yield

    predict = staticmethod(predict)
