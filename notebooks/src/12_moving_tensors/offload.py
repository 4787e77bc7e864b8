"""Formulas for lab 12's open exercise: passes of a model that exceeds its device's memory.

    kept       blocks that stay on the device
    streamed   all other blocks: they cross the bus in every pass, into `ahead` + 1 buffers as
               large as the largest streamed block

The time of a pass depends on when the bus and a buffer are free, and when the weights are loaded.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

PASSES = 4  # until the time of a pass is constant
BEST_MS = 650  # best known total: one pass of each model


@dataclass(frozen=True)
class Offloaded:
    """A model's bytes and compute time per block, its bus, and its device's memory."""

    name: str
    nbytes: tuple[int, ...]
    compute_us: tuple[float, ...]
    bus_bytes_per_us: float
    cap_bytes: int

    def held_bytes(self, keep: Collection[int], ahead: int) -> int:
        """Bytes on the device: the kept blocks and the buffers."""
        kept_bytes = sum(self.nbytes[k] for k in set(keep))
        streamed = [x for k, x in enumerate(self.nbytes) if k not in keep]
        return kept_bytes + min(ahead + 1, len(streamed)) * max(streamed, default=0)

    def pass_us(self, keep: Collection[int], ahead: int) -> float:
        """Microseconds of a pass in steady state."""
        now_us = bus_us = 0.0  # when the device, and the bus, are idle again
        freed_us: list[float] = []  # when each streamed block's buffer is free again
        pass_ends_us = []
        for _ in range(PASSES):
            for k, compute_us in enumerate(self.compute_us):
                if k not in keep:
                    free_us = freed_us[-ahead - 1] if len(freed_us) > ahead else 0.0
                    bus_us = max(bus_us, free_us) + self.nbytes[k] / self.bus_bytes_per_us
                    now_us = max(now_us, bus_us)
                now_us += compute_us
                if k not in keep:
                    freed_us.append(now_us)
            pass_ends_us.append(now_us)
        return pass_ends_us[-1] - pass_ends_us[-2]


@cache
def models() -> list[Offloaded]:
    """A GPT in which every fourth block has experts, with 2.3 times the bytes and 1.5 times the
    time, for few or many tokens per pass, in fp16. The bus has 25 GB/s (PCIe 4.0: 31.5), and
    5 of the 10.7 GB fit on the device.
    """
    width, blocks = 4096, 20
    dense, experts = 2 * 12 * width**2, 2 * (4 + 8 * 3) * width**2
    nbytes = tuple(experts if k % 4 == 3 else dense for k in range(blocks))
    offloaded = []
    for name, tokens, flops_per_us in (("few tokens", 512, 120e6), ("many tokens", 4096, 120e6)):
        compute_us = tuple(
            2 * 12 * width**2 * tokens / flops_per_us * (1.5 if k % 4 == 3 else 1.0)
            for k in range(blocks)
        )
        offloaded.append(Offloaded(name, nbytes, compute_us, 25e3, 5_000_000_000))
    return offloaded


def stream_all(model: Offloaded) -> tuple[set[int], int]:
    """Keep no blocks and load one block ahead: the baseline."""
    return set(), 1
