"""The open exercise of lab 12, on paper: a model larger than its device, token after token.

    kept       blocks whose weights stay on the device
    streamed   all others: they come over the bus in every pass, in `ahead` + 1 buffers as large as
               the largest of them

What a pass takes follows from when the bus is free, a buffer is free, and the weights are there.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

PASSES = 4  # until passes are alike
BEST_MS = 650  # for a pass of both models: the best known


@dataclass(frozen=True)
class Offloaded:
    """A model's blocks, their bytes and computing; its bus, and what its device may hold."""

    name: str
    nbytes: tuple[int, ...]
    compute_us: tuple[float, ...]
    bus_bytes_per_us: float
    cap_bytes: int

    def held_bytes(self, keep: Collection[int], ahead: int) -> int:
        """Weights on the device: those kept, and the buffers."""
        kept_bytes = sum(self.nbytes[k] for k in set(keep))
        streamed = [x for k, x in enumerate(self.nbytes) if k not in keep]
        return kept_bytes + min(ahead + 1, len(streamed)) * max(streamed, default=0)

    def pass_us(self, keep: Collection[int], ahead: int) -> float:
        """Microseconds of a pass, when all are alike."""
        now_us = bus_us = 0.0  # when the device, and the bus, have done all so far
        left_us: list[float] = []  # when each streamed block has computed, its buffer free again
        ends_us = []
        for _ in range(PASSES):
            for k, compute_us in enumerate(self.compute_us):
                if k not in keep:
                    free_us = left_us[-ahead - 1] if len(left_us) > ahead else 0.0
                    bus_us = max(bus_us, free_us) + self.nbytes[k] / self.bus_bytes_per_us
                    now_us = max(now_us, bus_us)
                now_us += compute_us
                if k not in keep:
                    left_us.append(now_us)
            ends_us.append(now_us)
        return ends_us[-1] - ends_us[-2]


@cache
def models() -> list[Offloaded]:
    """A GPT whose every fourth block has experts, larger and little slower; with few tokens in a
    pass, and with many. fp16; a bus of 25 GB/s (PCIe 4.0 has 31.5); 5 of 10.7 GB fit."""
    width, blocks = 4096, 20
    dense, experts = 2 * 12 * width**2, 2 * (4 + 8 * 3) * width**2
    nbytes = tuple(experts if k % 4 == 3 else dense for k in range(blocks))
    found = []
    for name, tokens, flops_per_us in (("few tokens", 512, 120e6), ("many tokens", 4096, 120e6)):
        compute_us = tuple(
            2 * 12 * width**2 * tokens / flops_per_us * (1.5 if k % 4 == 3 else 1.0)
            for k in range(blocks)
        )
        found.append(Offloaded(name, nbytes, compute_us, 25e3, 5_000_000_000))
    return found


def stream_all(model: Offloaded) -> tuple[set[int], int]:
    """Keep nothing, one ahead: the least that is asked for."""
    return set(), 1
