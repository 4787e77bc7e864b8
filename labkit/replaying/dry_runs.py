"""Dry runs: record one rank of a large world without data, memory or other ranks.

The code runs as on real ranks, but with torch's fake tensors and a fake process group, in which
every collective completes immediately. Only communication through labkit's communicator is
recorded. The tensors report the CPU as their device; the GPU default of torch's optimizers
("foreach": a few operations update all parameters) is patched in. Attention with dropout stores
its scores, as on a CPU. The recorded memory excludes the CUDA context, NCCL's buffers and
fragmentation, which together take several GB."""

import gc
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import torch
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from labkit.runtime.attach import on_paper
from labkit.runtime.output import in_notebook
from labkit.trace import Trace
from labkit.trace.measures import peak_memory
from labkit.trace.recording import record
from labkit.trace.recording.detail import QUERY_DEVICE

LONG_S, EVERY_S = 2.0, 0.2  # delay and interval of the progress display
LONG_IN_A_NOTEBOOK_S = 10.0  # longer, because printed progress stays in the output
Size = TypeVar("Size")


def dry_run(
    fn: Callable[..., object],
    *args: Any,
    ranks: int,
    alike: Mapping[int, Iterable[int]] | None = None,
    step: int = 1,
    seed: int = 0,
    as_on: Literal["cuda", "cpu"] = "cuda",
    **kwargs: Any,
) -> Trace:
    """Record one training step of `fn(*args, **kwargs)` in a world of `ranks` ranks, without data.

    Args:
        fn: builds a model and trains it without reading tensor values (no `loss.item()`). A model
            built outside `fn` would have values and take memory.
        alike: each rank to run, mapped to the ranks with the same behavior that it represents:
            {0: range(512), 512: range(512, 1024)}. By default, rank 0 represents all ranks.
        step: the training step to keep; by default the second, the first with optimizer state.
        as_on: the device type for which torch's optimizers choose their implementation.

    Returns that step with operations and memory; `replay` adds times. Raises ValueError for an
    invalid `alike`, or if `fn` runs too few steps or reads a value; RuntimeError if run on a rank.

    >>> def train():
    ...     model = DDP(GPT.preset("1M"))
    ...     optimizer = torch.optim.AdamW(model.parameters())
    ...     for _ in range(2):
    ...         optimizer.zero_grad()
    ...         model(torch.zeros(8, 64, dtype=torch.long)).sum().backward()
    ...         optimizer.step()
    >>> trace = dry_run(train, ranks=1024)
    """
    kept = Trace(about={"what": "dry run", "world_size": ranks})
    for rank, others in _aliases(alike, ranks).items():
        what = f"rank {rank} of {ranks:,}, without data"
        with on_paper(rank, ranks), _without_data(what, as_on):
            torch.manual_seed(seed)
            with record(detail_step=step) as trace:
                _run(fn, args, kwargs)
        if step not in trace.steps():
            raise ValueError(
                f"dry_run: the function ran {len(trace.steps())} training steps and has no step "
                f"{step}; run at least {step + 1}, or pass step=0"
            )
        forward = {span.step for span in trace.ranks[rank].spans if span.phase == "forward"}
        if forward and step not in forward:
            raise ValueError(
                f"dry_run: step {step} has no forward pass, because each optimizer.step() ends a "
                f"training step and the function has several optimizers; pass step={max(forward)}, "
                "or use one optimizer with several parameter groups"
            )
        kept.ranks[rank] = trace.step(step).ranks[rank]
        kept.ranks[rank].alike = others
    return kept


def _aliases(alike: Mapping[int, Iterable[int]] | None, ranks: int) -> dict[int, tuple[int, ...]]:
    """The ranks that each recorded rank represents. Raises ValueError unless each occurs once."""
    if ranks < 1:
        raise ValueError(f"dry_run: ranks={ranks}; choose at least 1")
    groups = {0: range(ranks)} if alike is None else alike
    represented = {rank: tuple(sorted({*others} - {rank})) for rank, others in groups.items()}
    if sorted([*represented, *chain(*represented.values())]) != list(range(ranks)):
        raise ValueError(
            f"dry_run: alike={alike!r} must contain each of the ranks 0 to {ranks - 1} once"
        )
    return represented


def _run(fn: Callable[..., object], args: Any, kwargs: Any) -> None:
    try:
        fn(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"dry_run: the function reads the value of a tensor ({error}), but a dry run has no "
            "values; remove calls such as loss.item(), and shapes that depend on values, such as "
            "x[x > 0]"
        ) from error


@contextmanager
def _without_data(label: str, as_on: str) -> Iterator[None]:
    """In this context, new tensors have no data."""
    mode, chooser = _FakeWithProgress(label), "_default_to_fused_or_foreach"

    def foreach(*_: Any, **__: Any) -> tuple[bool, bool]:
        return False, True

    with ExitStack() as patches:
        patches.enter_context(patch.object(nn.Module, "_apply", _converted))
        if as_on == "cuda":  # foreach: one operation updates many parameters
            for name, module in list(sys.modules.items()):
                if name.startswith("torch.optim.") and chooser in vars(module):
                    patches.enter_context(patch.object(module, chooser, foreach))
        patches.callback(mode.status.stop)
        # Freeze earlier objects: recording scans every object that Python's gc tracks.
        gc.freeze()
        patches.callback(gc.unfreeze)
        patches.enter_context(mode)
        yield


class _FakeWithProgress(FakeTensorMode):
    """Fake tensor mode that displays the operation count of a long run."""

    def __init__(self, label: str):
        super().__init__(allow_non_fake_inputs=True)
        self._label, self._operations, self._begun_s = label, 0, time.monotonic()
        self.status = Console().status(label)
        self._next_s = self._begun_s + (LONG_IN_A_NOTEBOOK_S if in_notebook() else LONG_S)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is QUERY_DEVICE:  # the most frequent call; not an operation
            return args[0].device
        self._operations += 1
        if time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            text = f"{self._label}: {self._operations:,} operations"
            if in_notebook():  # rich would create a widget, which can break nbconvert
                print(f"\r{text}", end="", flush=True)
            elif self.status.console.is_terminal:
                self.status.start()  # output of the function appears above the status
                self.status.update(f"{text}, {time.monotonic() - self._begun_s:.0f} s")
        return self.dispatch(func, types, args, kwargs)


def _converted(
    module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`nn.Module._apply` for fake tensors; torch's version would swap their contents."""
    for part in module.modules() if recurse else (module,):
        for parameter in part._parameters.values():
            if parameter is not None:
                parameter.data = convert(parameter.data)
                if parameter.grad is not None:
                    parameter.grad.data = convert(parameter.grad.data)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else convert(buffer)
    return module


# ---- does it fit?


def peak_of(trace: Trace) -> dict[str, int]:
    """Bytes by category at the peak, on the rank with the highest peak. Raises ValueError if no
    memory is recorded."""
    peaks = [peak_memory(rank) for rank in trace.ranks.values() if rank.memory]
    if not peaks:
        raise ValueError("this trace has no memory; record one with dry_run or detail_step=1")
    return max(peaks, key=lambda peak: sum(peak.values()))


def fits(trace: Trace, memory_bytes: float) -> bool:
    """Whether every rank's peak fits in `memory_bytes`. Raises the same errors as `peak_of`."""
    return sum(peak_of(trace).values()) <= memory_bytes


def largest_that_fits(
    record: Callable[[Size], Trace], sizes: Sequence[Size], memory_bytes: float
) -> Size | None:
    """The largest of the ascending `sizes` that fits, found by bisection, or None if none fits.

    >>> largest_that_fits(lambda depth: dry_run(train, depth, ranks=8), range(1, 97), 80e9)
    """
    fitting = bisect_left(sizes, True, key=lambda size: not fits(record(size), memory_bytes))
    return sizes[fitting - 1] if fitting else None
