"""Runs lab 10's answers on ranks or in one process, and computes the correct results."""

import random
from typing import Any

import torch
from torch import Tensor

from labkit.course.exercise import Student
from labkit.precision.dynamic_scale import DynamicScale
from labkit.precision.op_policy import CUDA

Types = tuple[torch.dtype, ...]

# --- runs_in(op, types, low)

OPS = [
    *("linear", "matmul", "conv2d"),
    *("softmax", "layer_norm", "exp", "sum", "cross_entropy_loss"),
    *("addcmul", "gelu", "relu", "add"),
]
LOWS = (torch.bfloat16, torch.float16)


def runs_in_cases() -> list[tuple[str, Types, torch.dtype]]:
    """Every op with every mix of input dtypes, for both 16-bit formats."""
    fp32 = torch.float32
    return [(op, types, low) for low in LOWS for op in OPS
            for types in ((low,), (fp32,), (low, fp32))]  # fmt: skip


def right_dtype(op: str, types: Types, low: torch.dtype) -> torch.dtype | None:
    """The dtype under the autocast policy for GPUs; None for no cast."""
    widest = torch.float32 if torch.float32 in types else low
    return {"low": low, "fp32": torch.float32, "promote": widest}.get(CUDA.of(op))


# --- update(scale, good, found_inf, interval)

INTERVALS = (1, 3, 4)


def infinities(interval: int) -> list[bool]:
    """Whether the gradients overflow, per step; in most steps they do not."""
    rng = random.Random(interval)
    return [rng.random() < 0.15 for _ in range(60)]


def student_scales(student: Student, interval: int) -> list[Any]:
    """The student's updates over a series of steps; each update starts from the previous result."""
    scale, good, results = 2.0**16, 0, []
    for found_inf in infinities(interval):
        answer = student(scale, good, found_inf, interval)
        results.append(answer)
        scale, good = answer
    return results


def right_scales(interval: int) -> list[tuple[float, int]]:
    """The updates of `DynamicScale` over the same series."""
    scaler, results = DynamicScale(2.0**16, 2.0, 0.5, interval), []
    for found_inf in infinities(interval):
        scaler.after_step(found_inf)
        results.append((scaler.scale, scaler._growth_tracker))
    return results


# --- unscale(comm, pieces, scale)

SCALE = 2.0**16
CASES: dict[str, tuple[int, float]] = {  # rank with a non-finite element (-1: none); the element
    "all gradients are finite": (-1, 0.0),
    "rank 1 has an inf": (1, torch.inf),
    "rank 0 has a NaN": (0, torch.nan),
    "rank 1 has a -inf": (1, -torch.inf),
}


def scaled_gradients(rank: int, size: int, case: str) -> list[Tensor]:
    """Two scaled fp16 gradients on ranks 0 and 1, none on rank 2."""
    if rank == 2:
        return []
    bad_rank, element = CASES[case]
    gradients = [torch.tensor([2.0**-9, 3.0 + rank]).half(), torch.tensor([100.0]).half()]
    if rank == bad_rank:
        gradients[1][0] = element
    return gradients


def right_gradients(rank: int, size: int) -> list[Tensor]:
    """This rank's unscaled gradients if all gradients are finite."""
    return [x.float() / SCALE for x in scaled_gradients(rank, size, "all gradients are finite")]


def run_unscale(comm: Any, student: Student, case: str) -> Any:
    """On a rank: the student's result for this rank's gradients."""
    return student(comm, scaled_gradients(comm.rank, comm.size, case), SCALE)


# --- master_step(parameters, masters, lr)

LR, STEPS = 1e-3, 50


def initial_weights() -> list[Tensor]:
    """Two parameters in bfloat16, the same on every call."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(6, generator=rng).bfloat16(), torch.ones(3).bfloat16()]


def gradients_of_step(step: int) -> list[Tensor]:
    """The gradients of a step, in bfloat16."""
    rng = torch.Generator().manual_seed(step)
    return [torch.randn(6, generator=rng).bfloat16(), torch.ones(3).bfloat16()]


def right_masters(steps: int = STEPS) -> list[Tensor]:
    """The weights in float32 after `steps` steps of plain SGD."""
    masters = [torch.nn.Parameter(x.float()) for x in initial_weights()]
    optimizer = torch.optim.SGD(masters, lr=LR)
    for step in range(steps):
        for master, g in zip(masters, gradients_of_step(step), strict=True):
            master.grad = g.float()
        optimizer.step()
    return [master.detach() for master in masters]


def master_steps(student: Student) -> tuple[list[Tensor], list[Tensor]]:
    """The student's weights in bfloat16 and in float32 after all steps."""
    parameters = [torch.nn.Parameter(x) for x in initial_weights()]
    masters = [x.float() for x in initial_weights()]
    for step in range(STEPS):
        for p, g in zip(parameters, gradients_of_step(step), strict=True):
            p.grad = g
        student(parameters, masters, LR)
    return [p.detach() for p in parameters], masters
