"""The open exercise of lab 10, on paper: gradients of a training run, and what scales make of them.

    numbers of a step   their log2 are normal around a centre, 26 below the largest
    largest             falls as the model learns, wanders, and sometimes jumps

A step loses the numbers that become 0 in fp16, or everything when the largest overflows.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

STEPS, INTERVAL = 400, 20
SPREAD, BELOW = 6.0, 26.0  # log2 of the numbers: deviation, and centre below the largest
BEST_LOST = 130_320  # of each 4,000,000 gradients: the best known
ZERO_LOG2, MOST = -25.0, 65504.0  # fp16: half of the smallest number; the largest number


class Step(NamedTuple):
    """log2 of the magnitudes of its gradients, as they are without a scale."""

    centre: float
    largest: float


@cache
def gradients_of_a_run() -> list[Step]:
    """A run drawn once for all: magnitudes fall slowly, wander, and now and then jump."""
    lot = random.Random(7)
    steps, wander = [], 0.0
    for i in range(STEPS):
        wander = 0.9 * wander + lot.gauss(0, 0.35)
        centre = -34.0 - 8.0 * i / STEPS + wander
        jump = lot.uniform(3, 5) if lot.random() < 0.02 else 0.0
        steps.append(Step(centre, centre + BELOW + jump))
    return steps


def lost(step: Step, scale: float) -> float:
    """The share of a step's numbers that do not reach the weights."""
    if scale * 2**step.largest > MOST:
        return 1.0
    sigmas = (ZERO_LOG2 - math.log2(scale) - step.centre) / SPREAD
    return 0.5 * (1 + math.erf(sigmas / math.sqrt(2)))


def scales_of(make: Callable[[], Any]) -> list[Any]:
    """The scale that a chooser has at each step; after it, it is told the largest gradient."""
    chooser, scales = make(), []
    for step in gradients_of_a_run():
        scale = chooser.scale
        scales.append(scale)
        fits = scale * 2**step.largest <= MOST
        chooser.after_step(2**step.largest if fits else math.inf)
    return scales


def lost_in_all(scales: Sequence[float]) -> int:
    """Of each 10,000 numbers of a step, summed over the steps."""
    return round(10_000 * sum(lost(*one) for one in zip(gradients_of_a_run(), scales, strict=True)))


class Torchs:
    """What torch.amp.GradScaler does, with an interval of 20."""

    def __init__(self) -> None:
        self.scale, self.good = 2.0**16, 0

    def after_step(self, amax: float) -> None:
        self.good = 0 if math.isinf(amax) else self.good + 1
        if math.isinf(amax):
            self.scale /= 2
        elif self.good == INTERVAL:
            self.scale, self.good = 2 * self.scale, 0
