"""A model of lab 08's open exercise: layers form units, which are gathered `prefetch` units ahead.
The model computes the exposed time (by the virtual clock) and the peak memory.

    forward     gather 0 | compute 0 | compute 1 | ...      gathers start `prefetch` units early
    backward    gather k | compute k | compute k-1 | ...    a reduce-scatter follows each unit
"""

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.predict.transformer import attention_core_flops
from labkit.replaying.engine import Compute, Issue, Wait, run


@dataclass(frozen=True)
class Layer:
    """An indivisible part of a model: parameter bytes in the compute dtype, compute seconds."""

    name: str
    nbytes: int
    forward_s: float

    @property
    def backward_s(self) -> float:
        return 2 * self.forward_s


@dataclass(frozen=True)
class Link:
    """A link between n ranks: an all-gather or reduce-scatter is n-1 messages of S/n bytes."""

    ranks: int
    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: int) -> float:
        steps = self.ranks - 1
        return steps * (self.latency_s + nbytes / self.ranks / self.bytes_per_s)


# Sixteen nodes with one link each; the links have a short or a long latency.
LINKS = {
    "short": Link(ranks=16, latency_s=20e-6, bytes_per_s=40e9),
    "long": Link(ranks=16, latency_s=300e-6, bytes_per_s=40e9),
}
LIMIT_BYTES = 900_000_000


def layers_of(flops_per_s: float = 150e12) -> list[Layer]:
    """A GPT of 1.5 billion parameters in bf16, 2 rows of 2,048 tokens: the embedding tables, the
    attention and MLP of each of 16 layers, and the head."""
    vocab, width, depth, rows, tokens = 50_257, 2560, 16, 2, 2 * 2048
    attention, mlp = 4 * width**2, 8 * width**2
    core_s = attention_core_flops(width, rows, tokens // rows) / flops_per_s
    layers = [Layer("tables", 2 * (vocab + 2048) * width, 1e-4)]
    for i in range(depth):
        seconds = 2 * tokens * attention / flops_per_s + core_s
        layers.append(Layer(f"{i}.attention", 2 * attention, seconds))
        layers.append(Layer(f"{i}.mlp", 2 * mlp, 2 * tokens * mlp / flops_per_s))
    head_s = 2 * tokens * vocab * width / flops_per_s
    return [*layers, Layer("head", 2 * vocab * width, head_s)]


def units_of(counts: Sequence[int], layers: Sequence[Layer]) -> list[list[Layer]]:
    """The layers of each unit; unit i has counts[i] layers."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [list(layers[end - count : end]) for count, end in zip(counts, ends)]


def most_held_bytes(counts: Sequence[int], prefetch: int, layers: Sequence[Layer]) -> int:
    """Peak bytes of the gathered parameters and of the gradients of the unit that computes:
    forward prefetches the units to the right, backward those to the left."""
    nbytes = [sum(x.nbytes for x in unit) for unit in units_of(counts, layers)]
    ahead = [nbytes[i : i + prefetch + 1] for i in range(len(nbytes))]
    behind = [nbytes[max(0, i - prefetch) : i + 1] for i in range(len(nbytes))]
    forward = max(sum(window) for window in ahead)
    return max(forward, *(own + sum(window) for own, window in zip(nbytes, behind)))


def exposed_us(counts: Sequence[int], prefetch: int, layers: Sequence[Layer], link: Link) -> float:
    """Microseconds that a rank waits in a step, by the clock of lab 06."""
    units = units_of(counts, layers)
    program: list[Compute | Issue | Wait] = []

    def send(kind: str, i: int) -> None:
        nbytes = sum(x.nbytes for x in units[i])
        program.append(Issue((kind, i), ranks=(0,), seconds=link.seconds(nbytes)))

    for phase, order in (("forward", range(len(units))), ("backward", range(len(units))[::-1])):
        started = 0
        for position, i in enumerate(order):
            while started <= min(position, len(units) - 1):  # unit i itself, if not prefetched
                send(f"gather, {phase}", order[started])
                started += 1
            program.append(Wait((f"gather, {phase}", i)))
            while started <= min(position + prefetch, len(units) - 1):
                send(f"gather, {phase}", order[started])
                started += 1
            program.append(Compute(sum(getattr(x, f"{phase}_s") for x in units[i])))
            if phase == "backward":
                send("reduce", i)
    program += [Wait(("reduce", i)) for i in range(len(units))]
    times = run({0: program})[0]
    waits = (timed for action, timed in zip(program, times) if isinstance(action, Wait))
    return 1e6 * sum(timed.ended_s - timed.began_s for timed in waits)
