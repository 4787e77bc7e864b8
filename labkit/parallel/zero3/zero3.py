"""ZeRO stage 3: parameters, gradients and optimizer state are sharded; a layer's parameters are
gathered only while the layer computes.

    each rank holds   16 P/n bytes for P parameters in mixed precision with Adam (master 4, gradient
                      4, moments 8), and the gathered units: the unit in use and the next unit
    each rank sends   (2c + g) P (n-1)/n bytes per step: two all-gathers in the compute dtype
                      (c bytes per element), one reduce-scatter of gradients (g bytes per element,
                      same dtype). P includes each unit's padding to n equal shares.

The module is split into units, such as the entries of a list. On every rank, with prefetch=1:

    compute    |  unit 0  |  unit 1  |  unit 2  | bwd 2 (last gradient) | bwd 1 | ...
    gather     0 |   1    |    2     |          | 2 |      1            |   0
    free                  0          1          2                       2       1
    reduce                                                              |  2  |  1

Hooks gather a unit before its forward and free it afterward; in backward, a hook on the output's
gradient gathers the unit again. The last parameter gradient starts one reduce-scatter and frees the
unit. (With frozen or unused parameters, the last input gradient frees the unit.)

Sources: "ZeRO", arXiv 1910.02054, sections 5.3 and 7.2.2; prefetch: "ZeRO-Infinity", 2104.07857,
section 6.2; units and hooks: "PyTorch FSDP", 2304.11277, section 3.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks

from labkit.comm import Comm
from labkit.parallel.common.ownership import (
    ParamSnapshot,
    at_end_of_backward,
    broadcast_tensors,
    claim,
    running_backward,
)
from labkit.parallel.zero3 import passes, validation
from labkit.parallel.zero3.flat import Flat
from labkit.parallel.zero3.sharded_init import sharded_init
from labkit.parallel.zero3.state import WholeState
from labkit.parallel.zero3.units import Unit, UnitPolicy, predict, register_hooks, units_of


class ZeRO3(WholeState, nn.Module):
    """Shards the parameters of `module` over the ranks; gathers each unit only while in use.

    Args:
        module: any module; all ranks start with rank 0's weights.
        comm: the ranks to shard over; default: all ranks.
        units: selects units, by module class(es) or a function module -> bool. Default: entries of
            the outermost lists, and each remaining module with parameters.
        persist_below: parameters with fewer elements stay whole; their gradients are all-reduced.
        prefetch: the number of units to gather ahead; 0: gather on demand.
        compute_dtype: dtype of gathered parameters and sent gradients; if 16-bit, shards are fp32.

    `parameters()` yields this rank's flat shards; names are unchanged. After wrapping, create the
    optimizer from these shards; updates must be elementwise. Group parameters by name, since shards
    have `p.ndim` 1. Clip with `model.clip_grad_norm_`; scale with labkit.GradScaler, not
    torch's. All ranks must use the same units in the same order. torch.compile skips the model.
    """

    init = staticmethod(sharded_init)  # in `with ZeRO3.init(comm):` no rank holds the full model
    predict = staticmethod(predict)

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        units: UnitPolicy | None = None,
        persist_below: int = 0,
        prefetch: int = 1,
        compute_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.module, self.comm, self.prefetch = module, Comm.of(comm), prefetch
        self.compute_dtype, self.peak_gathered_bytes = compute_dtype, 0
        validation.check_module(self, prefetch, persist_below)
        self.units = units_of(module, self.comm, units, persist_below, compute_dtype)
        self._flats = [flat for unit in self.units for flat in unit.flats]
        claim(module.named_parameters(), self)  # the module now holds the shards
        validation.check_optimizers()
        broadcast_tensors(module.buffers(), self.comm)
        self._unchanged = ParamSnapshot(module)
        self._named = list(module.named_parameters())
        self._flat_of: dict[Tensor, tuple[Unit, Flat]] = {}
        self._orders = {False: passes.Order(), True: passes.Order()}  # forward, backward
        self._pending, self._in_forward = passes.PendingGradients(), False
        self._saved_parameters = passes.SavedParameters(self.units, self._use)
        for unit in self.units:
            register_hooks(unit, self)

    @_disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if running_backward() is not None:  # activations are recomputed
            return self.module(*args, **kwargs)
        self._clean_up()
        self._unchanged.check()
        if self.training and torch.is_grad_enabled():
            broadcast_tensors(self.module.buffers(), self.comm)
        if self.compute_dtype is not None:
            args, kwargs = passes.cast((args, kwargs), self.compute_dtype)
        self._orders[False].begin_pass()
        self._in_forward, self.awaits_gradients = True, torch.is_grad_enabled()
        for unit in self.units:
            unit.rest(in_pass=True)
        try:
            with saved_tensors_hooks(self._saved_parameters.pack, self._saved_parameters.unpack):
                output = self.module(*args, **kwargs)
        finally:
            self._in_forward = False
        self._free_all()
        validation.check_unwritten(self._flats)
        for x in passes.tensors_in(output):
            if x.requires_grad and torch.is_grad_enabled():
                x.register_hook(lambda _: self._note_backward(running_backward() or 0))
        if not (self.training and torch.is_grad_enabled()):
            self.comm.compare_calls()  # in training, compared at the end of backward
        return output

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._use(unit)
        if unit.frees_itself or running_backward() is not None or not torch.is_grad_enabled():
            return None
        inputs, watched = passes.watch_inputs(args, kwargs, unit.on_input_grad)
        unit.inputs += max(1, inputs)  # no input requires grad: end of backward frees it
        return watched

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if running_backward() is not None:
            return  # backward is about to use the unit
        if torch.is_grad_enabled():
            passes.watch_outputs(output, partial(self._before_backward, unit))
        unit.has_run.add(module)
        unit.keep_gathered |= self._saved_parameters.shares_memory(output, unit)
        if not self._in_forward or len(unit.has_run) == len(unit.members):
            unit.free()

    def _use(self, unit: Unit, keep_gathered: bool = False) -> None:
        """Gathers `unit` (`keep_gathered`: kept until the pass ends), prefetches the next units."""
        unit.keep_gathered |= keep_gathered
        task = running_backward()
        if task is not None:
            self._note_backward(task, unit)
        if unit.is_gathered:
            return
        unit.start_gather(async_op=False)
        unit.finish_gather()
        for upcoming in self._orders[task is not None].after(unit, self.prefetch):
            upcoming.start_gather(async_op=True)
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, self.gathered_bytes)

    def _note_backward(self, task: int, unit: Unit | None = None) -> None:
        if self._pending.begin(task):
            for other in self.units:
                other.rest(in_pass=True)
            at_end_of_backward(partial(self._finish_backward, task))
        if unit:
            self._pending.expect(task, unit)

    def _before_backward(self, unit: Unit, gradient: Tensor) -> None:
        validation.check_first_order()
        self._use(unit)

    def _on_grad_ready(self, parameter: Tensor) -> None:
        unit, flat = self._flat_of[parameter]
        self.awaits_gradients = False
        flat.take_gradient(parameter)
        if flat.gradients.missing:
            return
        if not flat.keep_whole:
            self._pending.reduce(flat, async_op=True)
        unit.awaited.discard(flat)
        if not unit.awaited and not unit.has_frozen:  # backward may still need frozen parameters
            unit.frees_itself = True
            unit.free()

    def _finish_backward(self, task: int) -> None:
        self._pending.finish(task)
        if not self._pending:
            self._free_all()
            self._orders[True].begin_pass()
            self.comm.compare_calls()

    def _free_all(self) -> None:
        for unit in self.units:
            unit.end_pass()

    def _clean_up(self) -> None:
        self._free_all()  # an interrupted pass may leave units gathered
        for unit in self.units:
            unit.inputs = 0
        if self._pending:
            for flat in self._flats:
                flat.reset()
            self._pending.clear()
