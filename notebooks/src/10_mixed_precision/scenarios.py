"""Runs of lab 10's answers on ranks or alone, and the right results."""

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


def asked() -> list[tuple[str, Types, torch.dtype]]:
    """Every op with every mix of input types, for both low formats."""
    fp32 = torch.float32
    return [(op, types, low) for low in LOWS for op in OPS
            for types in ((low,), (fp32,), (low, fp32))]  # fmt: skip


def right_type(op: str, types: Types, low: torch.dtype) -> torch.dtype | None:
    """The type by a GPU's policy."""
    widest = torch.float32 if torch.float32 in types else low
    return {"low": low, "fp32": torch.float32, "promote": widest}.get(CUDA.of(op))


# --- update(scale, good, found_inf, interval)

INTERVALS = (1, 3, 4)


def infinities(interval: int) -> list[bool]:
    """For each step, whether it has an inf: most have none."""
    lot = random.Random(interval)
    return [lot.random() < 0.15 for _ in range(60)]


def all_scales(student: Student, interval: int) -> list[Any]:
    """The values of the student's update over a series of steps, each from the one before."""
    scale, good, seen = 2.0**16, 0, []
    for found_inf in infinities(interval):
        answer = student(scale, good, found_inf, interval)
        seen.append(answer)
        scale, good = answer
    return seen


def right_scales(interval: int) -> list[tuple[float, int]]:
    """The values of `DynamicScale` over the same series."""
    now, seen = DynamicScale(2.0**16, 2.0, 0.5, interval), []
    for found_inf in infinities(interval):
        now.after_step(found_inf)
        seen.append((now.scale, now._growth_tracker))
    return seen


# --- unscale(comm, pieces, scale)

SCALE = 2.0**16
CASES: dict[str, tuple[int, float]] = {  # which rank has which bad number; -1: none
    "all is finite": (-1, 0.0),
    "rank 1 has an inf": (1, torch.inf),
    "rank 0 has a NaN": (0, torch.nan),
    "rank 1 has a -inf": (1, -torch.inf),
}


def pieces_of(rank: int, size: int, case: str) -> list[Tensor]:
    """Two gradient pieces in fp16 per rank; the last of three ranks has none."""
    if rank == 2:
        return []
    whose, number = CASES[case]
    pieces = [torch.tensor([2.0**-9, 3.0 + rank]).half(), torch.tensor([100.0]).half()]
    if rank == whose:
        pieces[1][0] = number
    return pieces


def right_pieces(rank: int, size: int) -> list[Tensor]:
    """This rank's unscaled gradients if all are finite."""
    return [x.float() / SCALE for x in pieces_of(rank, size, "all is finite")]


def unscaled(comm: Any, student: Student, case: str) -> Any:
    """On a rank: the student's result for its pieces."""
    return student(comm, pieces_of(comm.rank, comm.size, case), SCALE)


# --- master_step(parameters, masters, lr)

LR, STEPS = 1e-3, 50


def some_weights() -> list[Tensor]:
    """Two parameters in bfloat16, the same on every call."""
    lot = torch.Generator().manual_seed(0)
    return [torch.randn(6, generator=lot).bfloat16(), torch.ones(3).bfloat16()]


def some_gradients(step: int) -> list[Tensor]:
    """The gradients of a step, in bfloat16."""
    lot = torch.Generator().manual_seed(step)
    return [torch.randn(6, generator=lot).bfloat16(), torch.ones(3).bfloat16()]


def right_masters(steps: int = STEPS) -> list[Tensor]:
    """The weights in float32 after `steps` steps of plain SGD."""
    masters = [torch.nn.Parameter(x.float()) for x in some_weights()]
    optimizer = torch.optim.SGD(masters, lr=LR)
    for step in range(steps):
        for master, g in zip(masters, some_gradients(step), strict=True):
            master.grad = g.float()
        optimizer.step()
    return [master.detach() for master in masters]


def master_steps(student: Student) -> tuple[list[Tensor], list[Tensor]]:
    """The student's weights in bfloat16 and in float32 after all steps."""
    parameters = [torch.nn.Parameter(x) for x in some_weights()]
    masters = [x.float() for x in some_weights()]
    for step in range(STEPS):
        for p, g in zip(parameters, some_gradients(step), strict=True):
            p.grad = g
        student(parameters, masters, LR)
    return [p.detach() for p in parameters], masters
