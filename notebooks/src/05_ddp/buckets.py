"""The bucket problem of lab 05, on paper: gradients that become ready one after the other, a wire,
and what is left to wait for.
"""

from collections.abc import Sequence

import torch

from labkit.comm import Link
from labkit.models import GPT

FAST, SLOW = 50e9, 20e9  # floating-point operations per second of two machines
LINK = Link(gbps=0.25, latency_us=500)
BEST_US = 56_831  # of waiting, on both machines together: the least possible


def all_reduce_us(nbytes: int, size: int = 2, link: Link = LINK) -> float:
    """Microseconds of a ring all-reduce: 2(n-1) messages of 1/n of the bytes, one by one."""
    return 2 * (size - 1) * (link.latency_us + 1e6 * link.seconds(nbytes) / size)


def gradients_of(speed: float, tokens: int = 1024) -> tuple[list[int], list[float]]:
    """Bytes of each gradient of the 1M GPT, and the microsecond at which backward has made it, in
    the order of backward. A weight takes 4 operations per token: 2 for its own gradient and 2
    for that of its input."""
    with torch.random.fork_rng(devices=[]):
        weights = list(GPT.preset("1M", vocab=256).parameters())[::-1]
    ready_us, now_us = [], 0.0
    for weight in weights:
        now_us += 1e6 * 4 * weight.numel() * tokens / speed
        ready_us.append(now_us)
    return [weight.nbytes for weight in weights], ready_us


def exposed_us(counts: Sequence[int], nbytes: Sequence[int], ready_us: Sequence[float]) -> float:
    """How long the ranks wait after backward, when bucket i takes the next counts[i] gradients."""
    wire_free_us, first = 0.0, 0
    for count in counts:
        last = first + count - 1
        begin_us = max(wire_free_us, ready_us[last])  # the bucket is full, and the wire is free
        wire_free_us = begin_us + all_reduce_us(sum(nbytes[first : last + 1]))
        first = last + 1
    return wire_free_us - ready_us[-1]
