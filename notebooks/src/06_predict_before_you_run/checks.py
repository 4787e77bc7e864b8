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


def _number(found: Any, name: str) -> None:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        fail(
            f"{name} returned {brief(found)}.",
            expected="a number: seconds",
            hint="Does it end with a return?" if found is None else "",
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"


# ---- ring_s(nbytes, n, latency_s, bytes_per_s)


def plain(n: int, latency_s: float, bytes_per_s: float, device: Device | None = None) -> Cluster:
    """One node of n devices."""
    device = device or Device("plain", {"float32": 1e12}, 80e9, 1e12, 0.0)
    return Cluster("plain", "plain", device, 1, n, Level("wire", bytes_per_s, latency_s, n))


@exercise(points=2)
def ring_s(student: Student) -> Iterator[str]:
    """ring_s(nbytes, n, latency_s, bytes_per_s): seconds of a ring all-reduce, alpha-beta."""
    cases: list[tuple[Any, ...]] = [
        (80_000_000, 8, 5e-6, 1e9),
        (80_000_000, 2, 1e-3, 1e9),
        (12_345_678, 7, 1e-3, 25e9),
        (1_000_000, 64, 50e-3, 12.5e6),
        (4_000_000, 1, 1e-3, 1e9),
    ]
    for given, found in zip(cases, alone_for_each(student, cases)):
        nbytes, n, latency_s, bytes_per_s = given
        _number(found, "ring_s")
        costs, ranks = Costs(plain(n, latency_s, bytes_per_s)), tuple(range(n))
        # Both halves of a ring: for an all-reduce, the replay may choose a faster algorithm.
        halves = [costs.collective(op, nbytes, ranks) for op in ("reduce_scatter", "all_gather")]
        right = sum(half.seconds for half in halves)
        if not isclose(found, right, rel_tol=1e-6, abs_tol=1e-12):
            hint = "How many messages follow each other, and how long is each?"
            if isclose(found, right - (2 * (n - 1) - 1) * latency_s, rel_tol=1e-6):
                hint = "Each of the messages, one after the other, has its own latency."
            elif n == 1:
                hint = "A rank alone sends nothing."
            elif isclose(found, 2 * (n - 1) * (latency_s + nbytes / bytes_per_s), rel_tol=1e-6):
                hint = "How large is the chunk that is sent in one step?"
            fail(
                f"{nbytes:,} bytes over {n} rank{'s' * (n > 1)} take {_seconds(found)} by your "
                f"formula, but {_seconds(right)} are right.",
                expected=f"{_seconds(right)}, with a latency of {latency_s * 1e3:g} ms and "
                f"{bytes_per_s / 1e9:g} GB/s",
                hint=hint,
            )
    yield "the seconds of 5 replayed rings, on 1 to 64 ranks"


# ---- product_s(m, n, k, element_bytes, flops_per_s, bytes_per_s)

PRODUCTS = ((512, 256, 1024), (1, 4096, 4096), (2048, 2048, 2048), (8, 64, 100_000))


@cache
def _products() -> list[Operation]:
    """The matmuls that a dry run records, in float32 and in bfloat16."""

    def multiply() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            for m, n, k in PRODUCTS:
                torch.empty(m, k, dtype=dtype) @ torch.empty(k, n, dtype=dtype)
        _end_step()

    operations = dry_run(multiply, ranks=1, step=0).ranks[0].operations
    return [operation for operation in operations if operation.sides]


def _end_step() -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()


@exercise(points=2)
def product_s(student: Student) -> Iterator[str]:
    """product_s(m, n, k, element_bytes, flops_per_s, bytes_per_s): the roofline of a matmul."""
    cases: list[tuple[Any, ...]] = []
    rights = []
    for flops_per_s, bytes_per_s in ((1e12, 1e11), (1e14, 2e12)):
        rates = {"float32": flops_per_s, "bfloat16": flops_per_s}
        device = Device("plain", rates, 80e9, bytes_per_s, 0.0)
        costs = Costs(plain(1, 0.0, 1e9, device))
        for operation in _products():
            element_bytes = 2 if operation.dtype == "bfloat16" else 4
            cases.append((*operation.sides, element_bytes, flops_per_s, bytes_per_s))
            rights.append((costs.compute_s(operation), operation))
    for given, found, (right, operation) in zip(cases, alone_for_each(student, cases), rights):
        _number(found, "product_s")
        if not isclose(found, right, rel_tol=1e-6):
            m, n, k, element_bytes, flops_per_s, bytes_per_s = given
            memory = isclose(right, operation.moved_bytes / bytes_per_s, rel_tol=1e-9)
            arithmetic_s = operation.flops / flops_per_s
            memory_s = operation.moved_bytes / bytes_per_s
            hint = "How many multiplications and additions are in one number of the result?"
            if memory:
                hint = "Which bytes are read, which are written?"
            if isclose(found, arithmetic_s + memory_s, rel_tol=1e-6):
                hint = "Both happen at the same time."
            elif isclose(found, min(arithmetic_s, memory_s), rel_tol=1e-6):
                hint = "Arithmetic or memory: the slower of the two decides."
            fail(
                f"[{m}, {k}] x [{k}, {n}] in {operation.dtype} takes {_seconds(found)} by your "
                f"formula, but {_seconds(right)} are right: it is "
                f"{'memory' if memory else 'compute'}-bound.",
                expected=f"{operation.flops:,} operations at {flops_per_s:g} a second, "
                f"{operation.moved_bytes:,} bytes at {bytes_per_s:g}",
                hint=hint,
            )
    yield "16 products that a dry run has counted, compute-bound and memory-bound"


# ---- volumes(width, depth, tokens, n, element_bytes)


class Layer(nn.Module):
    """A layer with its 12 w² parameters alone."""

    def __init__(self, width: int):
        super().__init__()
        self.square = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.square(x).unflatten(-1, (4, -1)).sum(-2)
        return y + self.down(self.up(y))


def _data(width: int, depth: int, tokens: int, dtype: torch.dtype) -> None:
    model = DDP(nn.Sequential(*(Layer(width) for _ in range(depth))).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the first step also sends the weights
        model(torch.ones(tokens, width, dtype=dtype)).sum().backward()
        optimizer.step()


def _tensor(width: int, depth: int, tokens: int, dtype: torch.dtype) -> None:
    comm = Comm()
    for _ in range(depth):
        for _of in ("attention", "mlp", "mlp, backward", "attention, backward"):
            comm.all_reduce(torch.empty(tokens, width, dtype=dtype))
    _end_step()


def _pipeline(width: int, depth: int, tokens: int, dtype: torch.dtype) -> None:
    """The messages of rank 1 of 3 or more: a stage in the middle."""
    comm, x = Comm(), torch.empty(tokens, width, dtype=dtype)
    comm.recv(x, comm.rank - 1)
    comm.send(x, comm.rank + 1)
    comm.recv(x, comm.rank + 1)
    comm.send(x, comm.rank - 1)
    _end_step()


@cache
def _counted(width: int, depth: int, tokens: int, n: int, element_bytes: int) -> tuple[int, ...]:
    """Bytes that rank 1 of n sends with each of the three strategies, from its events."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    found = []
    for play, step in ((_data, 1), (_tensor, 0), (_pipeline, 0)):
        alike = {1: range(n)}
        trace = dry_run(play, width, depth, tokens, dtype, ranks=n, step=step, alike=alike)
        found.append(sum(event.bus_bytes for event in trace.ranks[1].comms))
    return tuple(found)


@exercise(points=3)
def volumes(student: Student) -> Iterator[str]:
    """volumes(width, depth, tokens, n, element_bytes): bytes by (data, tensor, pipeline)."""
    cases: list[tuple[Any, ...]] = [(64, 3, 32, 8, 4), (128, 1, 1024, 4, 2), (32, 2, 512, 16, 2)]
    for given, found in zip(cases, alone_for_each(student, cases)):
        several(found, 3, "volumes returned", "three numbers: (data, tensor, pipeline)")
        for name, its, right in zip(_VOLUMES, found, _counted(*given)):
            if isinstance(its, bool) or not isinstance(its, (int, float)):
                fail(f"volumes: {name} is {brief(its)}.", expected="bytes")
            if not isclose(its, right, rel_tol=1e-9):
                width, depth, tokens, n, element_bytes = given
                fail(
                    f"{name}: {its:,.0f} bytes by your formula, but the dry run counts {right:,}.",
                    expected=f"{right:,} bytes from one of {n} ranks, with width {width}, depth "
                    f"{depth}, {tokens} tokens, {element_bytes} bytes a number",
                    hint=_VOLUMES[name],
                )
    yield "data: as labkit's DDP sends it"
    yield "tensor: 4 all-reduces of x in each layer"
    yield "pipeline: x forward, its gradient backward"


_VOLUMES = {  # and a hint for each
    "data": "One all-reduce of all gradients: 2(n-1)/n of their bytes.",
    "tensor": "How often is x all-reduced in a layer, forward and backward together?",
    "pipeline": "What does a rank in the middle send to the right, what to the left?",
}


# ---- done_s(program)

Program = list[tuple[str, Any]]


def _programs() -> list[Program]:
    """Small programs for one rule each, then some random ones, always the same."""
    found: list[Program] = [
        [("compute", 3.0), ("compute", 2.0)],
        [("send", 4.0), ("compute", 1.0), ("wait", 0)],
        [("send", 4.0), ("compute", 9.0), ("wait", 0)],
        [("send", 4.0), ("compute", 1.0)],
        [("send", 4.0), ("compute", 1.0), ("send", 2.0), ("wait", 1)],
        [("send", 1.0), ("compute", 5.0), ("send", 2.0), ("wait", 1), ("wait", 0)],
    ]
    lot = random.Random(6)
    for _ in range(40):
        program, sent = [], 0
        for _ in range(12):
            what = lot.choice(("compute", "send", "wait") if sent else ("compute", "send"))
            how = lot.randrange(sent) if what == "wait" else float(lot.randrange(1, 9))
            sent += what == "send"
            program.append((what, how))
        found.append(program)
    return found


def _by_the_clock(program: Program) -> float:
    parts: list[Compute | Issue | Wait] = []
    for what, how in program:
        match what:
            case "compute":
                parts.append(Compute(how))
            case "send":
                parts.append(Issue(sum(isinstance(x, Issue) for x in parts), (0,), how))
            case _:
                parts.append(Wait(how))
    return clock({0: [*parts, Compute(0.0)]})[0][-1].ended_s


@exercise(points=3)
def done_s(student: Student) -> Iterator[str]:
    """done_s(program): when one rank with one wire has finished its program."""
    programs = _programs()
    for program, found in zip(programs, alone_for_each(student, [(list(x),) for x in programs])):
        _number(found, "done_s")
        right = _by_the_clock(program)
        if not isclose(found, right, abs_tol=1e-9):
            fail(
                f"your clock shows {found:g} s, but {right:g} s is right.",
                expected=f"{right:g} s for {brief(program, 200)}",
                hint=_clock_hint(program, found),
            )
    yield "6 small programs and 40 drawn by lot, as labkit's own clock has them"


def _clock_hint(program: Program, found: float) -> str:
    computed_s = sum(how for what, how in program if what == "compute")
    sent_s = sum(how for what, how in program if what == "send")
    if sent_s and isclose(found, computed_s + sent_s):
        return "A send takes the wire's time: the rank goes on at once."
    if sum(what == "send" for what, _ in program) > 1:
        return "When can a message begin? Its rank must have sent it, and the wire must be free."
    if isclose(found, computed_s):
        return "What does a wait wait for?"
    return "A wait for what is over takes no time."


# ---- step_in_closed_form_s(facts)


@exercise(points=3)
def step_in_closed_form_s(student: Student) -> Iterator[str | Score]:
    """step_in_closed_form_s(facts): seconds of a DDP step; the score is its mean error."""
    cases = steps()
    found = alone_for_each(student, [(facts,) for _, facts, _ in cases])
    errors = []
    for (name, facts, right), its in zip(cases, found):
        _number(its, "step_in_closed_form_s")
        computing_s = facts.forward_s + facts.backward_s + facts.optimizer_s
        serial_s = computing_s + sum(facts.bucket_s)
        least_s = max(computing_s, facts.forward_s + sum(facts.bucket_s) + facts.optimizer_s)
        if not 0.999 * least_s <= its <= 1.001 * serial_s:
            short = its < least_s
            fail(
                f"{name}: {its * 1e3:.4g} ms by your formula, which cannot be.",
                expected=f"{least_s * 1e3:.4g} ms (all hidden) to {serial_s * 1e3:.4g} ms (nothing "
                f"hidden); the replay has {right * 1e3:.4g} ms",
                hint="What is left out?" if short else "What is counted twice?",
            )
        errors.append(abs(its - right) / right)
    error = round(1000 * sum(errors) / len(errors))
    if error > BOUNDS_ERROR:
        fail(
            f"the mean error is {error} permille, more than that of perfect overlap, "
            f"{BOUNDS_ERROR}.",
            expected="a formula that knows more than that",
            hint="A bucket leaves when backward has filled it, and the one before has left.",
        )
    yield f"between all hidden and nothing hidden, for {len(cases)} steps"
    yield Score(error, BEST_ERROR, "permille of mean error")


BOUNDS_ERROR = 64  # of overlap_s in the lab
BEST_ERROR = 7  # the best known
