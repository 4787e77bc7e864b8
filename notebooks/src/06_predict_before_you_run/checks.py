"""Checks of lab 06, "Predict before you run"."""

import random
from collections.abc import Iterator
from functools import cache
from math import isclose
from typing import Any

import torch
from torch import nn

from labkit.clusters import Cluster, Device, Level
from labkit.comm import Comm
from labkit.course.exercise import Score, Student, exercise
from labkit.course.findings import brief, fail, several
from labkit.course.ranks import alone_for_each
from labkit.parallel import DDP
from labkit.replaying import Compute, Costs, Issue, Wait, dry_run
from labkit.replaying import run as clock
from labkit.trace import Operation

from .scenarios import steps


def _check_number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail(
            f"{name} returned {brief(value)}.",
            expected="a number of seconds",
            hint="Does it end with a return?" if value is None else "",
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"


# ---- ring_s(nbytes, n, latency_s, bytes_per_s)


def single_node(
    n: int, latency_s: float, bytes_per_s: float, device: Device | None = None
) -> Cluster:
    """A cluster of one node with n devices."""
    device = device or Device("plain", {"float32": 1e12}, 80e9, 1e12, 0.0)
    return Cluster("plain", "plain", device, 1, n, Level("link", bytes_per_s, latency_s, n))


@exercise(points=2)
def ring_s(student: Student) -> Iterator[str]:
    """ring_s(nbytes, n, latency_s, bytes_per_s): the alpha-beta time of a ring all-reduce."""
    cases: list[tuple[Any, ...]] = [
        (80_000_000, 8, 5e-6, 1e9),
        (80_000_000, 2, 1e-3, 1e9),
        (12_345_678, 7, 1e-3, 25e9),
        (1_000_000, 64, 50e-3, 12.5e6),
        (4_000_000, 1, 1e-3, 1e9),
    ]
    for given, returned_s in zip(cases, alone_for_each(student, cases)):
        nbytes, n, latency_s, bytes_per_s = given
        _check_number(returned_s, "ring_s")
        costs, ranks = Costs(single_node(n, latency_s, bytes_per_s)), tuple(range(n))
        # Both halves of a ring: for an all-reduce, the replay may choose a faster algorithm.
        halves = [costs.collective(op, nbytes, ranks) for op in ("reduce_scatter", "all_gather")]
        expected_s = sum(half.seconds for half in halves)
        if not isclose(returned_s, expected_s, rel_tol=1e-6, abs_tol=1e-12):
            hint = "How many messages follow one another, and how long does each take?"
            if isclose(returned_s, expected_s - (2 * (n - 1) - 1) * latency_s, rel_tol=1e-6):
                hint = "Each of the messages, one after another, adds its latency."
            elif n == 1:
                hint = "A single rank sends nothing."
            elif isclose(
                returned_s, 2 * (n - 1) * (latency_s + nbytes / bytes_per_s), rel_tol=1e-6
            ):
                hint = "How large is the chunk sent in one step?"
            fail(
                f"a ring all-reduce of {nbytes:,} bytes over {n} rank{'s' * (n > 1)} should take "
                f"{_seconds(expected_s)}, not {_seconds(returned_s)}.",
                expected=f"{_seconds(expected_s)}, with a latency of {latency_s * 1e3:g} ms and "
                f"{bytes_per_s / 1e9:g} GB/s",
                hint=hint,
            )
    yield "the times of 5 replayed ring all-reduces, on 1 to 64 ranks"


# ---- matmul_s(m, n, k, element_bytes, flops_per_s, bytes_per_s)

MATMULS = ((512, 256, 1024), (1, 4096, 4096), (2048, 2048, 2048), (8, 64, 100_000))


@cache
def _matmuls() -> list[Operation]:
    """The matmuls that a dry run records, in float32 and in bfloat16."""

    def multiply() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            for m, n, k in MATMULS:
                torch.empty(m, k, dtype=dtype) @ torch.empty(k, n, dtype=dtype)
        _end_step()

    operations = dry_run(multiply, ranks=1, step=0).ranks[0].operations
    return [operation for operation in operations if operation.sides]


def _end_step() -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()


@exercise(points=2)
def matmul_s(student: Student) -> Iterator[str]:
    """matmul_s(m, n, k, element_bytes, flops_per_s, bytes_per_s): the roofline of a matmul."""
    cases: list[tuple[Any, ...]] = []
    rights = []
    for flops_per_s, bytes_per_s in ((1e12, 1e11), (1e14, 2e12)):
        rates = {"float32": flops_per_s, "bfloat16": flops_per_s}
        device = Device("plain", rates, 80e9, bytes_per_s, 0.0)
        costs = Costs(single_node(1, 0.0, 1e9, device))
        for operation in _matmuls():
            element_bytes = 2 if operation.dtype == "bfloat16" else 4
            cases.append((*operation.sides, element_bytes, flops_per_s, bytes_per_s))
            rights.append((costs.compute_s(operation), operation))
    for given, returned_s, (expected_s, operation) in zip(
        cases, alone_for_each(student, cases), rights
    ):
        _check_number(returned_s, "matmul_s")
        if not isclose(returned_s, expected_s, rel_tol=1e-6):
            m, n, k, element_bytes, flops_per_s, bytes_per_s = given
            memory = isclose(expected_s, operation.moved_bytes / bytes_per_s, rel_tol=1e-9)
            arithmetic_s = operation.flops / flops_per_s
            memory_s = operation.moved_bytes / bytes_per_s
            hint = "How many multiplications and additions does an element of the result take?"
            if memory:
                hint = "Which bytes are read, and which are written?"
            if isclose(returned_s, arithmetic_s + memory_s, rel_tol=1e-6):
                hint = "Arithmetic and memory traffic overlap."
            elif isclose(returned_s, min(arithmetic_s, memory_s), rel_tol=1e-6):
                hint = "Arithmetic or memory: the slower of the two sets the time."
            fail(
                f"[{m}, {k}] x [{k}, {n}] in {operation.dtype} should take {_seconds(expected_s)}, "
                f"not {_seconds(returned_s)}: it is {'memory' if memory else 'compute'}-bound.",
                expected=f"{operation.flops:,} FLOPs at {flops_per_s:g} FLOP/s, "
                f"{operation.moved_bytes:,} bytes at {bytes_per_s:g} bytes/s",
                hint=hint,
            )
    yield "16 matmuls recorded in a dry run, compute-bound and memory-bound"


# ---- volumes(width, depth, tokens, n, element_bytes)


class Layer(nn.Module):
    """A layer with exactly 12 w² parameters."""

    def __init__(self, width: int):
        super().__init__()
        self.attention = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.attention(x).unflatten(-1, (4, -1)).sum(-2)
        return y + self.down(self.up(y))


def _data_parallel(width: int, depth: int, tokens: int, dtype: torch.dtype) -> None:
    model = DDP(nn.Sequential(*(Layer(width) for _ in range(depth))).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the first step also sends the weights
        model(torch.ones(tokens, width, dtype=dtype)).sum().backward()
        optimizer.step()


def _tensor_parallel(width: int, depth: int, tokens: int, dtype: torch.dtype) -> None:
    comm = Comm()
    for _ in range(depth):
        for _ in ("attention", "mlp", "mlp, backward", "attention, backward"):
            comm.all_reduce(torch.empty(tokens, width, dtype=dtype))
    _end_step()


def _pipeline_parallel(width: int, depth: int, tokens: int, dtype: torch.dtype) -> None:
    """The messages of a middle stage, such as rank 1 of 3."""
    comm, x = Comm(), torch.empty(tokens, width, dtype=dtype)
    comm.recv(x, comm.rank - 1)
    comm.send(x, comm.rank + 1)
    comm.recv(x, comm.rank + 1)
    comm.send(x, comm.rank - 1)
    _end_step()


@cache
def _counted_bytes(
    width: int, depth: int, tokens: int, n: int, element_bytes: int
) -> tuple[int, ...]:
    """Bytes that rank 1 of n sends with each of the three strategies, counted from its events."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    sent_bytes = []
    for play, step in ((_data_parallel, 1), (_tensor_parallel, 0), (_pipeline_parallel, 0)):
        alike = {1: range(n)}
        trace = dry_run(play, width, depth, tokens, dtype, ranks=n, step=step, alike=alike)
        sent_bytes.append(sum(event.bus_bytes for event in trace.ranks[1].comms))
    return tuple(sent_bytes)


@exercise(points=3)
def volumes(student: Student) -> Iterator[str]:
    """volumes(width, depth, tokens, n, element_bytes): bytes sent, as (data, tensor, pipeline)."""
    cases: list[tuple[Any, ...]] = [(64, 3, 32, 8, 4), (128, 1, 1024, 4, 2), (32, 2, 512, 16, 2)]
    for given, returned in zip(cases, alone_for_each(student, cases)):
        several(returned, 3, "volumes returned", "three numbers: (data, tensor, pipeline)")
        for name, volume, expected in zip(_VOLUMES, returned, _counted_bytes(*given)):
            if isinstance(volume, bool) or not isinstance(volume, (int, float)):
                fail(f"volumes: {name} is {brief(volume)}.", expected="a number of bytes")
            if not isclose(volume, expected, rel_tol=1e-9):
                width, depth, tokens, n, element_bytes = given
                fail(
                    f"{name}: your formula gives {volume:,.0f} bytes, but the dry run counts "
                    f"{expected:,}.",
                    expected=f"{expected:,} bytes sent by one of {n} ranks, with width {width}, "
                    f"depth {depth}, {tokens} tokens, {element_bytes} bytes per element",
                    hint=_VOLUMES[name],
                )
    yield "data: the bytes that labkit's DDP sends"
    yield "tensor: 4 all-reduces of x in each layer"
    yield "pipeline: x forward and its gradient backward"


_VOLUMES = {  # strategy -> hint
    "data": "One all-reduce of all gradients: 2(n-1)/n of their bytes.",
    "tensor": "How many times does a layer all-reduce x, forward and backward together?",
    "pipeline": "What does a middle rank send to the right, and what to the left?",
}


# ---- done_s(program)

Program = list[tuple[str, Any]]


def _programs() -> list[Program]:
    """Small programs, one per rule, then random programs from a fixed seed."""
    programs: list[Program] = [
        [("compute", 3.0), ("compute", 2.0)],
        [("send", 4.0), ("compute", 1.0), ("wait", 0)],
        [("send", 4.0), ("compute", 9.0), ("wait", 0)],
        [("send", 4.0), ("compute", 1.0)],
        [("send", 4.0), ("compute", 1.0), ("send", 2.0), ("wait", 1)],
        [("send", 1.0), ("compute", 5.0), ("send", 2.0), ("wait", 1), ("wait", 0)],
    ]
    rng = random.Random(6)
    for _ in range(40):
        program, sent = [], 0
        for _ in range(12):
            op = rng.choice(("compute", "send", "wait") if sent else ("compute", "send"))
            argument = rng.randrange(sent) if op == "wait" else float(rng.randrange(1, 9))
            sent += op == "send"
            program.append((op, argument))
        programs.append(program)
    return programs


def _replayed_s(program: Program) -> float:
    actions: list[Compute | Issue | Wait] = []
    for op, argument in program:
        match op:
            case "compute":
                actions.append(Compute(argument))
            case "send":
                actions.append(Issue(sum(isinstance(x, Issue) for x in actions), (0,), argument))
            case _:
                actions.append(Wait(argument))
    return clock({0: [*actions, Compute(0.0)]})[0][-1].ended_s


@exercise(points=3)
def done_s(student: Student) -> Iterator[str]:
    """done_s(program): when a rank with one link finishes its program."""
    programs = _programs()
    for program, returned_s in zip(
        programs, alone_for_each(student, [(list(x),) for x in programs])
    ):
        _check_number(returned_s, "done_s")
        expected_s = _replayed_s(program)
        if not isclose(returned_s, expected_s, abs_tol=1e-9):
            fail(
                f"your clock ends at {returned_s:g} s, but should end at {expected_s:g} s.",
                expected=f"{expected_s:g} s for {brief(program, 200)}",
                hint=_clock_hint(program, returned_s),
            )
    yield "6 small and 40 random programs, as timed by labkit's clock"


def _clock_hint(program: Program, returned_s: float) -> str:
    computed_s = sum(argument for op, argument in program if op == "compute")
    sent_s = sum(argument for op, argument in program if op == "send")
    if sent_s and isclose(returned_s, computed_s + sent_s):
        return "A send occupies the link only: the rank continues at once."
    if sum(op == "send" for op, _ in program) > 1:
        return "When can a message start? The rank must have issued it, and the link must be free."
    if isclose(returned_s, computed_s):
        return "What does a wait wait for?"
    return "A wait for a finished message takes no time."


# ---- step_in_closed_form_s(facts)


@exercise(points=3)
def step_in_closed_form_s(student: Student) -> Iterator[str | Score]:
    """step_in_closed_form_s(facts): seconds of a DDP step; the score is its mean error."""
    cases = steps()
    returned = alone_for_each(student, [(facts,) for _, facts, _ in cases])
    errors = []
    for (name, facts, replayed_s), step_s in zip(cases, returned):
        _check_number(step_s, "step_in_closed_form_s")
        computing_s = facts.forward_s + facts.backward_s + facts.optimizer_s
        serial_s = computing_s + sum(facts.bucket_s)
        least_s = max(computing_s, facts.forward_s + sum(facts.bucket_s) + facts.optimizer_s)
        if not 0.999 * least_s <= step_s <= 1.001 * serial_s:
            too_short = step_s < least_s
            fail(
                f"{name}: your formula gives {step_s * 1e3:.4g} ms, which is impossible.",
                expected=f"{least_s * 1e3:.4g} ms (perfect overlap) to {serial_s * 1e3:.4g} ms (no "
                f"overlap); the replay takes {replayed_s * 1e3:.4g} ms",
                hint="What is missing?" if too_short else "What is counted twice?",
            )
        errors.append(abs(step_s - replayed_s) / replayed_s)
    error = round(1000 * sum(errors) / len(errors))
    if error > OVERLAP_ERROR:
        fail(
            f"the mean error is {error} per mille, more than perfect overlap's {OVERLAP_ERROR}.",
            expected=f"at most {OVERLAP_ERROR} per mille",
            hint="A bucket is sent when backward has filled it and the previous one has been sent.",
        )
    yield f"between perfect overlap and no overlap, for {len(cases)} steps"
    yield Score(error, BEST_ERROR, "per mille mean error")


OVERLAP_ERROR = 64  # error of the lab's overlap_s
BEST_ERROR = 7  # the best known
