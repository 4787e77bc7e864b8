"""Layers over stages, so that the dearest stage is as cheap as can be.

    costs   [ 5  1  1  1  4 ]      3 stages       [ 5 | 1 1 1 | 4 ]      [1, 3, 1], dearest 5

A pipeline goes as fast as its slowest stage. Layers stay in order, so a choice is where to cut; the
best is found exactly, by what is best for the first layers on fewer stages. Of several that are
equally good there, the evenest is taken, whose sum of squares is the least.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

Cost = Callable[[float, float], float]  # of all stages so far and of one more, together


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """How many consecutive layers each stage gets, 1 or more. `costs`: of each layer, in any unit.

    Raises ValueError for more stages than layers, and for costs below 0 or not finite.

    >>> balance([5, 1, 1, 1, 4], stages=3)
    [1, 3, 1]
    """
    if stages < 1:
        raise ValueError(f"stages={stages}: a pipeline has at least 1")
    if stages > len(costs):
        raise ValueError(
            f"stages={stages} and {len(costs)} layers: each stage needs a layer; take at most "
            f"{len(costs)} stages"
        )
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"costs[{layer}]={cost}: the cost of a layer is a number from 0 on")
    before = [0.0, *accumulate(costs)]  # of the layers before each
    dearest, _ = _best(before, stages, max, math.inf)
    _, counts = _best(before, stages, lambda so_far, one: so_far + one * one, dearest)
    return counts


def _best(
    before: Sequence[float], stages: int, together: Cost, limit: float
) -> tuple[float, list[int]]:
    """The least that all stages together cost, and their numbers of layers; none dearer than
    `limit`."""
    layers = len(before) - 1
    least: list[tuple[float, list[int]]] = [(math.inf, [])] * (layers + 1)
    least[0] = (0.0, [])  # of the first layers, on the stages so far
    for _ in range(stages):
        following: list[tuple[float, list[int]]] = [(math.inf, [])] * (layers + 1)
        for end in range(1, layers + 1):
            for begin in reversed(range(end)):
                one = before[end] - before[begin]
                if one > limit:
                    break
                cost = together(least[begin][0], one)
                if cost < following[end][0]:
                    following[end] = (cost, [*least[begin][1], end - begin])
        least = following
    return least[layers]
