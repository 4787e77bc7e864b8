"""Step times of a small GPT per number format: mixed precision and recompute, labkit's and torch's.

    case            labkit                                 torch
    ─────────────────────────────────────────────────────────────────────────────────────────────
    fp32            all in float32
    tf32            matmuls in TF32 (on a GPU)
    bf16            MasterWeights                          torch.autocast, fp32 weights
    fp16            MasterWeights, GradScaler              torch.autocast, torch.amp.GradScaler
    fp8             bf16, matmuls of blocks in 8 bits      (a CPU rounds to 8 bits and multiplies
                                                           in fp32: it shows errors, not time)
    recompute       full, fp32                             torch.utils.checkpoint

All cases run in one process, in alternating turns. Peak memory comes from the GPU's allocator; on a
CPU, the recorder counts memory in a separate step.
"""

import gc
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch.utils.checkpoint import checkpoint

from labkit.bench import harness
from labkit.bench.harness import Contest, StepTimes
from labkit.clusters import cluster
from labkit.data import loss
from labkit.memory.edits import Recompute
from labkit.models import GPT
from labkit.precision.fp8 import check_has_fp8, use_fp8
from labkit.precision.master import MasterWeights
from labkit.precision.scaler import GradScaler
from labkit.predict import mfu
from labkit.replaying.planning import layout
from labkit.runtime.progress import progress
from labkit.trace.measures import peak_memory
from labkit.trace.recording import record

LR = 1e-4
STEPS = 3  # per turn
WITH_DEVICE = {  # torch's GPU name -> a cluster with this GPU's peak rates
    "NVIDIA H200": "h200-node",
    "NVIDIA H100 80GB HBM3": "dgx-h100",
    "NVIDIA A100-SXM4-40GB": "selene",
    "NVIDIA A100-SXM4-80GB": "selene",
}
PEAK_OF = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}
CONTESTS = [
    Contest("bf16", "torch.amp bf16", 1.05),
    Contest("fp16", "torch.amp fp16", 1.05),
    Contest("recompute", "torch checkpoint", 1.05),
]


@dataclass(frozen=True)
class Sizes(layout.Sizes):
    """The sizes of the model and of a step's batch."""

    rows: int = 8


ON_CPU = Sizes(vocab=256, width=128, depth=2, heads=4, context=64, rows=4)
ON_GPU = Sizes(vocab=32768, width=1024, depth=12, heads=16, context=1024)


@dataclass(frozen=True)
class Case:
    """How to run a step: `dtype` of the model's weights, `context` of each forward."""

    dtype: torch.dtype = torch.float32
    context: Callable[[str], AbstractContextManager[Any]] = lambda kind: nullcontext()
    edit: Callable[[GPT], object] = lambda model: None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    scaler: Callable[[str], Any] = lambda kind: torch.amp.GradScaler(kind, enabled=False)
    matmuls: str = "highest"  # torch.set_float32_matmul_precision

    def stepper(self, sizes: Sizes, device: torch.device) -> Callable[[], None]:
        """A function that runs one step of a new model and optimizer."""
        torch.manual_seed(0)
        s = sizes
        model = GPT(s.vocab, s.width, s.depth, s.heads, s.context).to(device, self.dtype)
        self.edit(model)
        optimizer = self.optimizer(model.parameters(), lr=LR)
        scaler = self.scaler(device.type)
        batch = harness.random_batch(s.vocab, s.rows, s.context, device)

        def step() -> None:
            optimizer.zero_grad()
            with self.context(device.type):
                value = loss(model(batch.x), batch)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()

        return step


def _checkpointed(model: GPT) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


_masters = partial(Case, optimizer=partial(MasterWeights, optimizer_cls=torch.optim.AdamW))
_bf16, _fp16 = (partial(torch.autocast, dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
CASES = {
    "fp32": Case(),
    "tf32": Case(matmuls="high"),
    "bf16": _masters(torch.bfloat16),
    "torch.amp bf16": Case(context=_bf16),
    "fp16": _masters(torch.float16, scaler=lambda kind: GradScaler()),
    "torch.amp fp16": Case(context=_fp16, scaler=torch.amp.GradScaler),
    "fp8": _masters(torch.bfloat16, edit=partial(use_fp8, only="blocks.*")),
    "recompute": Case(edit=Recompute),
    "torch checkpoint": Case(edit=_checkpointed),
}


def bench_precision(
    only: Sequence[str] = (),
    turns: int = 20,
    device: str | None = None,
    sizes: Sizes | None = None,
) -> list[StepTimes]:
    """Time the cases in `only`, or all that the device supports, and their peers.

    Raises ValueError for an unknown name."""
    harness.check_names(only, CASES, "no benchmark of {!r}")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = sizes or (ON_GPU if where.type == "cuda" else ON_CPU)
    names = [name for name in CASES if _wanted(name, only) and _supported(name, where)]
    peaks = {name: _peak_bytes(name, sizes, where) for name in progress(names, "peak memory")}
    steppers = {name: CASES[name].stepper(sizes, where) for name in names}
    cases = {name: partial(_turn_s, name, step, where) for name, step in steppers.items()}
    for turn in progress(cases.values(), "warming up", len(cases)):
        turn()
    seconds = harness.take_turns(cases, turns, f"steps on {where}")
    contests = [x for x in CONTESTS if x.ours in names and x.theirs in names]
    times = StepTimes(_about(where, sizes), seconds, contests, {"peak_bytes": peaks})
    times.figures["mfu"] = {name: mfu_of(times, name, sizes) for name in names}
    return [times]


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or name in only or any(x.theirs == name and x.ours in only for x in CONTESTS)


def _supported(name: str, where: torch.device) -> bool:
    if name == "tf32":
        return where.type == "cuda" and torch.cuda.get_device_capability(where) >= (8, 0)
    if name == "fp8" and where.type == "cuda":
        try:
            check_has_fp8(where, simulate=False)
        except ValueError:
            return False
    return True


def _turn_s(name: str, step: Callable[[], None], where: torch.device, count: int = STEPS) -> float:
    """Mean seconds per step over `count` steps, at this case's matmul precision."""
    torch.set_float32_matmul_precision(CASES[name].matmuls)
    try:
        return harness.seconds_of(step, count, after=harness.sync_of(where))
    finally:
        torch.set_float32_matmul_precision("highest")


def _peak_bytes(name: str, sizes: Sizes, where: torch.device) -> int:
    """Peak memory of a case's third step, run alone: by then, all the case's state exists."""
    gc.collect()  # free the previous case
    others_bytes = torch.cuda.memory_allocated(where) if where.type == "cuda" else 0
    step = CASES[name].stepper(sizes, where)
    _turn_s(name, step, where, 2)
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
        _turn_s(name, step, where, 1)
        return torch.cuda.max_memory_allocated(where) - others_bytes
    with record(detail_step=0) as trace:
        _turn_s(name, step, where, 1)
    return sum(peak_memory(trace.ranks[0]).values())


def mfu_of(times: StepTimes, name: str, sizes: Sizes) -> float | None:
    """Model FLOPs utilization of a case; None without a known peak for its format and GPU."""
    dtype = PEAK_OF.get(name.removeprefix("torch.amp "))
    device = times.about["device"]
    peaks = cluster(WITH_DEVICE[device]).device.peak_flops if device in WITH_DEVICE else {}
    if dtype is None or dtype not in peaks:
        return None
    return mfu(sizes.step_flops(sizes.rows), times.ms(name) / 1e3, peaks[dtype])


def _about(where: torch.device, sizes: Sizes) -> dict[str, str]:
    on_gpu, s = where.type == "cuda", sizes
    return {
        "model": f"GPT of {s.depth} x {s.width}, {s.rows} x {s.context} tokens",
        "device": torch.cuda.get_device_name(where) if on_gpu else _processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "peak": "allocator's" if on_gpu else "counted by the recorder",
    }


def _processor() -> str:
    """The CPU and its 16-bit instructions."""
    has = torch.cpu.get_capabilities()
    kinds = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")
    words = ", ".join(kind for kind in kinds if has.get(kind)) or "nothing"
    return f"{has.get('cpu_name', platform.machine())} CPU, for 16 bits: {words}"


def table(measured: Sequence[StepTimes]) -> Table:
    """One row per case, with ratio and aim if the case has a peer."""
    (times,) = measured
    first, about = next(iter(times.seconds)), times.about
    peers = ", ".join(f"{x.ours} to {x.theirs}" for x in times.contests)
    shown = harness.titled(
        f"Step of a {about['model']}, on {about['device']}",
        f"Peak memory: {about['peak']}. MFU: of the format's peak FLOP/s, if known. Ratio: median "
        f"and quartiles of the turns, {peers}.",
        ("case", "ms", f"/ {first}", "peak MB", "MFU", "ratio", "", "aim"), ("case",),
    )  # fmt: skip
    ratios = {x.ours: harness.ratio_cells(times, x) for x in times.contests}
    for name in times.seconds:
        share, peak_bytes = (times.figures[quantity][name] for quantity in ("mfu", "peak_bytes"))
        shown.add_row(
            name, f"{times.ms(name):.1f}", f"{times.ratio(name, first)[1]:.2f}",
            f"{peak_bytes / 1e6:.1f}", "" if share is None else f"{share:.1%}",
            *ratios.get(name, ()),
        )  # fmt: skip
    return shown
