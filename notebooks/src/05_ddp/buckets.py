"""A model of lab 05's bucket problem: gradients become ready one by one, a link sends full buckets,
and after backward the ranks wait for the remaining buckets.
"""

from collections.abc import Sequence

import torch

from labkit.comm import Link
from labkit.models import GPT

FAST, SLOW = 50e9, 20e9  # FLOP/s of two machines
LINK = Link(gbps=0.25, latency_us=500)
BEST_US = 56_831  # the minimum wait, summed over both machines


def all_reduce_us(nbytes: int, size: int = 2, link: Link = LINK) -> float:
    """Microseconds of a ring all-reduce: 2(n-1) messages of 1/n of the bytes, one after another."""
    return 2 * (size - 1) * (link.latency_us + 1e6 * link.seconds(nbytes) / size)


def gradients_of(flops_per_s: float, tokens: int = 1024) -> tuple[list[int], list[float]]:
    """For each gradient of the 1M GPT, in backward's order: its bytes, and the microsecond at which
    backward has computed it. A weight takes 4 FLOPs per token: 2 for its gradient and 2 for the
    gradient of its input."""
    with torch.random.fork_rng(devices=[]):
        weights = list(GPT.preset("1M", vocab=256).parameters())[::-1]
    ready_us, now_us = [], 0.0
    for weight in weights:
        now_us += 1e6 * 4 * weight.numel() * tokens / flops_per_s
        ready_us.append(now_us)
    return [weight.nbytes for weight in weights], ready_us


def exposed_us(counts: Sequence[int], nbytes: Sequence[int], ready_us: Sequence[float]) -> float:
    """Microseconds of waiting after backward, if bucket i takes the next counts[i] gradients."""
    link_free_us, first = 0.0, 0
    for count in counts:
        last = first + count - 1
        begin_us = max(link_free_us, ready_us[last])  # the bucket is full, and the link is free
        link_free_us = begin_us + all_reduce_us(sum(nbytes[first : last + 1]))
        first = last + 1
    return link_free_us - ready_us[-1]
