"""Steps of a small GPT in each number format, and our mixed precision and recompute beside torch's.

    fp32            all in float32                         what ours is held to
    tf32            products in TF32 (a GPU)               ─────────────────────────────────────
    bf16            MasterWeights                          torch.autocast, fp32 weights
    fp16            MasterWeights, GradScaler              torch.autocast, torch.amp.GradScaler
    fp8             bf16, products of blocks in 8 bits     (a CPU rounds to 8 bits, and multiplies
                                                           in fp32: it shows errors, not time)
    recompute       full, fp32                             torch.utils.checkpoint

All take their steps in one process, in turns, so that a machine that slows down slows all of them;
a ratio is taken turn by turn. Peak memory is the GPU's allocator's; on a CPU, what the recorder
counts in a step of its own.
"""

import datetime
import gc
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from labkit.bench.precision_found import CONTESTS, Sizes, Steps
from labkit.data import Batch, loss
from labkit.memory.edits import Recompute
from labkit.models import GPT
from labkit.precision.fp8 import check_has_fp8, use_fp8
from labkit.precision.master import MasterWeights
from labkit.precision.scaler import GradScaler
from labkit.runtime.progress import progress
from labkit.trace.measures import peak_memory
from labkit.trace.recording import record

LR = 1e-4
STEPS = 3  # in a turn

ON_CPU = Sizes(vocab=256, width=128, depth=2, heads=4, length=64, rows=4)
ON_GPU = Sizes(vocab=32768, width=1024, depth=12, heads=16, length=1024, rows=8)

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """How a step is taken: `dtype` of the model's weights; `around` each forward."""

    dtype: torch.dtype = torch.float32
    around: Callable[[str], AbstractContextManager[Any]] = lambda kind: nullcontext()
    edit: Callable[[GPT], object] = lambda model: None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    scaler: Callable[[str], Any] | None = None
    products: str = "highest"  # torch.set_float32_matmul_precision

    def step(self, sizes: Sizes, device: torch.device) -> Step:
        """A model with its optimizer: a function that does one step."""
        torch.manual_seed(0)
        s = sizes
        model = GPT(s.vocab, s.width, s.depth, s.heads, s.length).to(device, self.dtype)
        self.edit(model)
        optimizer = self.optimizer(model.parameters(), lr=LR)
        scaler = self.scaler(device.type) if self.scaler else None
        tokens = torch.randint(s.vocab, (s.rows, s.length + 1), device=device)
        batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), s.rows * s.length)

        def step() -> None:
            optimizer.zero_grad()
            with self.around(device.type):
                value = loss(model(batch.x), batch)
            if scaler is None:
                value.backward()
                optimizer.step()
            else:
                scaler.scale(value).backward()
                scaler.step(optimizer)
                scaler.update()

        return step


def _masters(dtype: torch.dtype, **more: Any) -> Case:
    return Case(dtype, optimizer=partial(MasterWeights, optimizer_cls=torch.optim.AdamW), **more)


def _amp(dtype: torch.dtype, **more: Any) -> Case:
    return Case(around=partial(torch.autocast, dtype=dtype), **more)


def _checkpointed(model: GPT) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


CASES = {
    "fp32": Case(),
    "tf32": Case(products="high"),
    "bf16": _masters(torch.bfloat16),
    "torch.amp bf16": _amp(torch.bfloat16),
    "fp16": _masters(torch.float16, scaler=lambda kind: GradScaler()),
    "torch.amp fp16": _amp(torch.float16, scaler=torch.amp.GradScaler),
    "fp8": _masters(torch.bfloat16, edit=partial(use_fp8, only="blocks.*")),
    "recompute": Case(edit=Recompute),
    "torch checkpoint": Case(edit=_checkpointed),
}


def bench_precision(
    only: Sequence[str] = (),
    turns: int = 20,
    device: str | None = None,
    sizes: Sizes | None = None,
) -> Steps:
    """Time the steps of `only` these cases, or all that the device has, and what they are held to.

    Raises ValueError for a name that is none of them.
    """
    check_names(only)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = sizes or (ON_GPU if where.type == "cuda" else ON_CPU)
    names = [name for name in CASES if _wanted(name, only) and _is_there(name, where)]
    peaks = {name: _peak_bytes(name, sizes, where) for name in progress(names, "peak memory")}
    steps = {name: CASES[name].step(sizes, where) for name in names}
    for name in progress(names, "warming up"):
        _turn_s(name, steps[name], where)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in progress(range(turns), f"steps on {where}"):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            seconds[name].append(_turn_s(name, steps[name], where))
    return Steps(_about(where), sizes, seconds, peaks)


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a case that is not timed, listing those that are."""
    if unknown := [name for name in names if name not in CASES]:
        raise ValueError(f"no case {unknown[0]!r} is timed; choose of {', '.join(CASES)}")


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or name in only or any(o.theirs == name and o.ours in only for o in CONTESTS)


def _is_there(name: str, where: torch.device) -> bool:
    if name == "tf32":
        return where.type == "cuda" and torch.cuda.get_device_capability(where) >= (8, 0)
    if name == "fp8" and where.type == "cuda":
        try:
            check_has_fp8(where, simulate=False)
        except ValueError:
            return False
    return True


def _run(name: str, step: Step, where: torch.device) -> None:
    torch.set_float32_matmul_precision(CASES[name].products)
    try:
        step()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
    finally:
        torch.set_float32_matmul_precision("highest")


def _turn_s(name: str, step: Step, where: torch.device) -> float:
    def some() -> None:
        for _ in range(STEPS):
            step()

    began_s = time.perf_counter()
    _run(name, some, where)
    return (time.perf_counter() - began_s) / STEPS


def _peak_bytes(name: str, sizes: Sizes, where: torch.device) -> int:
    """Of a case that is there alone, from its third step on: then all state is made."""
    gc.collect()  # the case before
    others_bytes = torch.cuda.memory_allocated(where) if where.type == "cuda" else 0
    step = CASES[name].step(sizes, where)
    for _ in range(2):
        _run(name, step, where)
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
        _run(name, step, where)
        return torch.cuda.max_memory_allocated(where) - others_bytes
    with record(detail_step=0) as trace:
        _run(name, step, where)
    return sum(peak_memory(trace.ranks[0]).values())


def _about(where: torch.device) -> dict[str, str]:
    on_gpu = where.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(where) if on_gpu else _processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "peak": "allocator's" if on_gpu else "counted by the recorder",
    }


def _processor() -> str:
    """The CPU, and what it has to multiply 16 bits with."""
    has = torch.cpu.get_capabilities()
    kinds = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")
    words = ", ".join(kind for kind in kinds if has.get(kind)) or "nothing"
    return f"{has.get('cpu_name', platform.machine())} CPU, for 16 bits: {words}"
