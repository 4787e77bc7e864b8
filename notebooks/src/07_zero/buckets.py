"""The open exercise of lab 07, on paper: gradients that become ready one after the other, the wire
of a cluster, and the most that a rank holds of them at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from labkit.clusters import cluster
from labkit.models import GPT
from labkit.replaying import Compute, Costs, Issue, run

RANKS, TOKENS, MESSAGES = 32, 8192, 10
ELEMENT_BYTES = 2  # gradients in 16 bits
CLUSTERS = ("v100-cloud", "dgx-h100")  # a slow wire, a fast one
BEST_KB = 100_880  # at the peaks of both clusters together: the best known


@dataclass(frozen=True)
class Backward:
    """One backward on a cluster: gradient i has `nbytes[i]` and is there after `ready_us[i]`, in
    the order in which backward makes them."""

    name: str
    nbytes: tuple[int, ...]
    ready_us: tuple[float, ...]

    def held_bytes(self, counts: Sequence[int]) -> list[tuple[float, int]]:
        """Microsecond, and bytes from then on, when bucket i takes the next counts[i]: a gradient
        is held from when it is there until its bucket has been reduce-scattered, then 1/n of it.
        """
        ends = [0, *accumulate(counts)]
        sizes = [sum(self.nbytes[i:j]) for i, j in pairwise(ends)]
        changes = list(zip(self.ready_us, self.nbytes))
        for nbytes, over_us in zip(sizes, self._over_us(ends, sizes)):
            changes.append((over_us, nbytes // RANKS - nbytes))
        changes.sort()
        return list(zip((when for when, _ in changes), accumulate(change for _, change in changes)))

    def peak_bytes(self, counts: Sequence[int]) -> int:
        """The most of it."""
        return max(nbytes for _, nbytes in self.held_bytes(counts))

    def _over_us(self, ends: Sequence[int], sizes: Sequence[int]) -> list[float]:
        """When each bucket has been sent, by the clock of the replays."""
        program: list[Compute | Issue] = []
        now_us = 0.0
        for i, last in enumerate(ends[1:]):
            program.append(Compute(self.ready_us[last - 1] - now_us))
            program.append(Issue(i, (0,), 1e6 * _seconds(self.name, sizes[i])))
            now_us = self.ready_us[last - 1]
        return [timed.ended_s for timed in run({0: program})[0][1::2]]  # seconds stand for µs


@cache
def _costs(name: str) -> Costs:
    return Costs(cluster(name))


@cache
def _seconds(name: str, nbytes: int) -> float:
    return _costs(name).collective("reduce_scatter", nbytes, tuple(range(RANKS))).seconds


@cache
def backwards() -> list[Backward]:
    """Of a GPT with 84M parameters, on each cluster. A weight takes 4 operations per token: 2 for
    its own gradient and 2 for that of its input."""
    with torch.device("meta"):
        weights = list(GPT(vocab=8192, width=1024, depth=6, heads=16, context=512).parameters())
    numels = [p.numel() for p in reversed(weights)]
    found = []
    for name in CLUSTERS:
        flops_per_s = 0.5 * cluster(name).device.peak_flops["float16"]  # half of it is usual
        ready_us = accumulate(1e6 * 4 * numel * TOKENS / flops_per_s for numel in numels)
        nbytes = tuple(ELEMENT_BYTES * numel for numel in numels)
        found.append(Backward(name, nbytes, tuple(ready_us)))
    return found


def equal_counts(gradients: int, messages: int) -> list[int]:
    """As many gradients in each bucket, as far as possible."""
    return counts_of([gradients * i // messages for i in range(messages + 1)])


def counts_of(ends: Sequence[int]) -> list[int]:
    """[0, 2, 5] -> [2, 3]"""
    return [j - i for i, j in pairwise(ends)]


def sent_in_buckets(comm: Any, student: Callable[..., Any], case: Backward) -> Any:
    """The counts that the student chose; the buckets they mean are really sent, at 1/1000."""
    counts = student(case, MESSAGES)
    if isinstance(counts, list) and all(isinstance(x, int) and x > 0 for x in counts):
        ends = [0, *accumulate(counts)]
        for i, j in pairwise(ends):
            share = torch.zeros(1 + sum(case.nbytes[i:j]) // 1000 // comm.size)
            comm.reduce_scatter_tensor(share, share.repeat(comm.size))
    return counts
