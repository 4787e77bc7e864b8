"""The plan of lab 08, on paper: layers in units, gathered so many units ahead; what it waits for by
the virtual clock, and what it holds.

    forward     gather 0 | compute 0 | compute 1 | ...      gathers leave `prefetch` units early
    backward    gather k | compute k | compute k-1 | ...    each unit's gradients leave behind it
"""

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.predict.transformer import attention_core_flops
from labkit.replaying.engine import Compute, Issue, Wait, run


@dataclass(frozen=True)
class Layer:
    """A part of a model that is not cut: its parameters in the compute dtype, its seconds."""

    name: str
    nbytes: int
    forward_s: float

    @property
    def backward_s(self) -> float:
        return 2 * self.forward_s


@dataclass(frozen=True)
class Wire:
    """Between `ranks` ranks: an all-gather or reduce-scatter is n-1 messages of S/n bytes."""

    ranks: int
    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: int) -> float:
        steps = self.ranks - 1
        return steps * (self.latency_s + nbytes / self.ranks / self.bytes_per_s)


# Sixteen nodes with one wire each: a good network, and one that is slow to begin.
WIRES = {
    "short": Wire(ranks=16, latency_s=20e-6, bytes_per_s=40e9),
    "long": Wire(ranks=16, latency_s=300e-6, bytes_per_s=40e9),
}
LIMIT_BYTES = 900_000_000


def layers_of(flops_per_s: float = 150e12) -> list[Layer]:
    """A GPT of 1.5 billion parameters in bf16, 2 rows of 2,048 tokens: the tables, attention and
    MLP of each of 16 layers, the head."""
    vocab, width, depth, rows, tokens = 50_257, 2560, 16, 2, 2 * 2048
    attention, mlp = 4 * width**2, 8 * width**2
    core_s = attention_core_flops(width, rows, tokens // rows) / flops_per_s
    found = [Layer("tables", 2 * (vocab + 2048) * width, 1e-4)]
    for i in range(depth):
        seconds = 2 * tokens * attention / flops_per_s + core_s
        found.append(Layer(f"{i}.attention", 2 * attention, seconds))
        found.append(Layer(f"{i}.mlp", 2 * mlp, 2 * tokens * mlp / flops_per_s))
    head_s = 2 * tokens * vocab * width / flops_per_s
    return [*found, Layer("head", 2 * vocab * width, head_s)]


def units_of(counts: Sequence[int], layers: Sequence[Layer]) -> list[list[Layer]]:
    """counts[i] layers in unit i."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [list(layers[end - count : end]) for count, end in zip(counts, ends)]


def most_held_bytes(counts: Sequence[int], prefetch: int, layers: Sequence[Layer]) -> int:
    """Parameters that are whole at one time, and the gradients of the unit that computes: forward
    looks ahead to the right, backward to the left."""
    nbytes = [sum(x.nbytes for x in unit) for unit in units_of(counts, layers)]
    ahead = [nbytes[i : i + prefetch + 1] for i in range(len(nbytes))]
    behind = [nbytes[max(0, i - prefetch) : i + 1] for i in range(len(nbytes))]
    forward = max(sum(window) for window in ahead)
    return max(forward, *(own + sum(window) for own, window in zip(nbytes, behind)))


def exposed_us(counts: Sequence[int], prefetch: int, layers: Sequence[Layer], wire: Wire) -> float:
    """What a rank waits in a step, in microseconds, by the clock of lab 06."""
    units = units_of(counts, layers)
    program: list[Compute | Issue | Wait] = []

    def send(what: str, i: int) -> None:
        nbytes = sum(x.nbytes for x in units[i])
        program.append(Issue((what, i), ranks=(0,), seconds=wire.seconds(nbytes)))

    for phase, order in (("forward", range(len(units))), ("backward", range(len(units))[::-1])):
        asked = 0
        for place, i in enumerate(order):
            while asked <= min(place, len(units) - 1):  # its own, where nobody asked before
                send(f"gather, {phase}", order[asked])
                asked += 1
            program.append(Wait((f"gather, {phase}", i)))
            while asked <= min(place + prefetch, len(units) - 1):
                send(f"gather, {phase}", order[asked])
                asked += 1
            program.append(Compute(sum(getattr(x, f"{phase}_s") for x in units[i])))
            if phase == "backward":
                send("reduce", i)
    program += [Wait(("reduce", i)) for i in range(len(units))]
    times = run({0: program})[0]
    waits = (when for thing, when in zip(program, times) if isinstance(thing, Wait))
    return 1e6 * sum(when.ended_s - when.began_s for when in waits)
