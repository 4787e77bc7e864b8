"""Formulas for lab 10's open exercise: the gradients that a loss scale loses in a training run.

    gradients of a step   their log2 is normally distributed, centered 26 below the largest
    largest               falls as the model learns, wanders, and sometimes jumps

A step loses the gradients that become 0 in fp16, or all gradients when the largest overflows.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

STEPS, INTERVAL = 400, 20
SPREAD, BELOW = 6.0, 26.0  # log2 of gradients: standard deviation; largest minus center
BEST_LOST = 130_320  # best known, of 4,000,000 gradients
ZERO_LOG2, FP16_MAX = -25.0, 65504.0  # log2 of half of fp16's smallest number; fp16's largest


class Step(NamedTuple):
    """log2 of the gradients' magnitudes before scaling."""

    center: float
    largest: float


@cache
def gradients_of_a_run() -> list[Step]:
    """A random run, the same on every call: magnitudes fall slowly, wander, and sometimes jump."""
    rng = random.Random(7)
    steps, wander = [], 0.0
    for i in range(STEPS):
        wander = 0.9 * wander + rng.gauss(0, 0.35)
        center = -34.0 - 8.0 * i / STEPS + wander
        jump = rng.uniform(3, 5) if rng.random() < 0.02 else 0.0
        steps.append(Step(center, center + BELOW + jump))
    return steps


def lost(step: Step, scale: float) -> float:
    """The fraction of a step's gradients that do not reach the weights."""
    if scale * 2**step.largest > FP16_MAX:
        return 1.0
    sigmas = (ZERO_LOG2 - math.log2(scale) - step.center) / SPREAD
    return 0.5 * (1 + math.erf(sigmas / math.sqrt(2)))


def scales_of(make: Callable[[], Any]) -> list[Any]:
    """The scale at each step; the chooser then gets the largest gradient, or inf on overflow."""
    chooser, scales = make(), []
    for step in gradients_of_a_run():
        scale = chooser.scale
        scales.append(scale)
        finite = scale * 2**step.largest <= FP16_MAX
        chooser.after_step(2**step.largest if finite else math.inf)
    return scales


def total_lost(scales: Sequence[float]) -> int:
    """The number of lost gradients if each step has 10,000 gradients."""
    steps = zip(gradients_of_a_run(), scales, strict=True)
    return round(10_000 * sum(lost(step, scale) for step, scale in steps))


class TorchGradScaler:
    """The rule of torch.amp.GradScaler, with an interval of 20."""

    def __init__(self) -> None:
        self.scale, self.good = 2.0**16, 0

    def after_step(self, amax: float) -> None:
        self.good = 0 if math.isinf(amax) else self.good + 1
        if math.isinf(amax):
            self.scale /= 2
        elif self.good == INTERVAL:
            self.scale, self.good = 2 * self.scale, 0
