"""A model of lab 07's open exercise: gradients become ready one by one, a cluster's link sends full
buckets, and a rank holds the gradients that have not been sent.
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
CLUSTERS = ("v100-cloud", "dgx-h100")  # with a slow and a fast link
BEST_KB = 100_880  # best known sum of both clusters' peaks


@dataclass(frozen=True)
class Backward:
    """One backward on a cluster: gradient i, in backward's order, has `nbytes[i]` bytes and is
    ready after `ready_us[i]`."""

    name: str
    nbytes: tuple[int, ...]
    ready_us: tuple[float, ...]

    def held_bytes(self, counts: Sequence[int]) -> list[tuple[float, int]]:
        """(microsecond, bytes held from then on), if bucket i takes the next counts[i] gradients.
        A ready gradient is held until its bucket has been reduce-scattered; 1/n remains.
        """
        ends = [0, *accumulate(counts)]
        sizes = [sum(self.nbytes[i:j]) for i, j in pairwise(ends)]
        changes = list(zip(self.ready_us, self.nbytes))
        for nbytes, sent_us in zip(sizes, self._sent_us(ends, sizes)):
            changes.append((sent_us, nbytes // RANKS - nbytes))
        changes.sort()
        return list(zip((when for when, _ in changes), accumulate(change for _, change in changes)))

    def peak_bytes(self, counts: Sequence[int]) -> int:
        """The maximum of `held_bytes`."""
        return max(nbytes for _, nbytes in self.held_bytes(counts))

    def _sent_us(self, ends: Sequence[int], sizes: Sequence[int]) -> list[float]:
        """When each bucket has been sent, in microseconds of the replay's clock."""
        program: list[Compute | Issue] = []
        now_us = 0.0
        for i, last in enumerate(ends[1:]):
            program.append(Compute(self.ready_us[last - 1] - now_us))
            program.append(Issue(i, (0,), 1e6 * _seconds(self.name, sizes[i])))
            now_us = self.ready_us[last - 1]
        return [timed.ended_s for timed in run({0: program})[0][1::2]]


@cache
def _costs(name: str) -> Costs:
    return Costs(cluster(name))


@cache
def _seconds(name: str, nbytes: int) -> float:
    return _costs(name).collective("reduce_scatter", nbytes, tuple(range(RANKS))).seconds


@cache
def backwards() -> list[Backward]:
    """The backward of a GPT with 84M parameters, on each cluster. A weight takes 4 FLOPs per
    token: 2 for its gradient and 2 for the gradient of its input."""
    with torch.device("meta"):
        weights = list(GPT(vocab=8192, width=1024, depth=6, heads=16, context=512).parameters())
    numels = [p.numel() for p in reversed(weights)]
    cases = []
    for name in CLUSTERS:
        flops_per_s = 0.5 * cluster(name).device.peak_flops["float16"]  # half the peak is typical
        ready_us = accumulate(1e6 * 4 * numel * TOKENS / flops_per_s for numel in numels)
        nbytes = tuple(ELEMENT_BYTES * numel for numel in numels)
        cases.append(Backward(name, nbytes, tuple(ready_us)))
    return cases


def equal_counts(gradients: int, messages: int) -> list[int]:
    """The number of gradients per bucket; counts differ by at most one."""
    return counts_of([gradients * i // messages for i in range(messages + 1)])


def counts_of(ends: Sequence[int]) -> list[int]:
    """[0, 2, 5] -> [2, 3]"""
    return [j - i for i, j in pairwise(ends)]


def sent_in_buckets(comm: Any, student: Callable[..., Any], case: Backward) -> Any:
    """The student's counts, after a reduce-scatter of 1/1000 of each bucket's bytes."""
    counts = student(case, MESSAGES)
    if isinstance(counts, list) and all(isinstance(x, int) and x > 0 for x in counts):
        ends = [0, *accumulate(counts)]
        for i, j in pairwise(ends):
            share = torch.zeros(1 + sum(case.nbytes[i:j]) // 1000 // comm.size)
            comm.reduce_scatter_tensor(share, share.repeat(comm.size))
    return counts
