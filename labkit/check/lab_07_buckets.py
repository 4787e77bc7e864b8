"""The open exercise of lab 07, on paper: gradients that become ready one after the other, the wire
of a cluster, and the most that a rank holds of them at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch

from labkit.clusters import cluster
from labkit.models import GPT
from labkit.replaying import Compute, Costs, Issue, run

RANKS, TOKENS, MESSAGES = 32, 8192, 10
ELEMENT_BYTES = 2  # gradients in 16 bits
CLUSTERS = ("v100-cloud", "dgx-h100")  # a slow wire, a fast one


@dataclass(frozen=True)
class Backward:
    """One backward on a cluster: gradient i has `nbytes[i]` and is there after `ready_us[i]`, in
    the order in which backward makes them."""

    name: str
    nbytes: tuple[int, ...]
    ready_us: tuple[float, ...]

    def peak_bytes(self, counts: Sequence[int]) -> int:
        """The most that a rank holds of gradients when bucket i takes the next counts[i]: each
        gradient from when it is there until its bucket has been reduce-scattered; 1/n of it then.
        """
        ends = [0, *accumulate(counts)]
        sizes = [sum(self.nbytes[i:j]) for i, j in pairwise(ends)]
        changes = [(when, nbytes) for when, nbytes in zip(self.ready_us, self.nbytes)]
        for nbytes, over_us in zip(sizes, self._over_us(ends, sizes)):
            changes.append((over_us, nbytes // RANKS - nbytes))
        return max(accumulate(change for _, change in sorted(changes)))

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
    """Of a GPT with 84M parameters on each cluster. A weight takes 4 operations per token: 2 for its own
    gradient and 2 for that of its input."""
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
    ends = [gradients * i // messages for i in range(messages + 1)]
    return [j - i for i, j in pairwise(ends)]


@cache
def best_peak_bytes(case: Backward, messages: int = MESSAGES) -> int:
    """The least that moving one end of a bucket after the other finds, from several starts."""
    total, best = len(case.nbytes), case.peak_bytes([len(case.nbytes)])
    for shrink in (0.6, 0.7, 0.8, 0.9, 1.0):
        weights = [shrink**i for i in range(messages)]
        goals = [sum(case.nbytes) * x / sum(weights) for x in accumulate(weights)]
        sums = list(accumulate(case.nbytes))
        ends = [min(range(total), key=lambda i: abs(sums[i] - goal)) + 1 for goal in goals[:-1]]
        best = min(best, _moved(case, [0, *ends, total]))
    return best


def _moved(case: Backward, ends: list[int]) -> int:
    def peak(ends: list[int]) -> int:
        counts = [j - i for i, j in pairwise(ends)]
        return case.peak_bytes(counts) if min(counts) > 0 else sum(case.nbytes) * 2

    best, better = peak(ends), True
    while better:
        better = False
        for place in range(1, len(ends) - 1):
            for end in range(ends[place - 1] + 1, ends[place + 1]):
                moved = [*ends[:place], end, *ends[place + 1 :]]
                if (its := peak(moved)) < best:
                    best, ends, better = its, moved, True
    return best
