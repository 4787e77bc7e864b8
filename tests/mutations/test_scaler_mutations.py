"""A faulty loss scaler must turn its proofs red."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness import Mutation, here, noticed, replaces
from labkit import GradScaler, World
from labkit.precision import master, scaler, unscaling
from labkit.precision.dynamic_scale import DynamicScale
from labkit.precision.shadow_optimizer import ShadowOptimizer
from scaler_contract import check_as_torch, check_equal_to_single
from test_scaler import test_gradients_that_fp16_cannot_hold_reach_the_masters as held_by_fp16


class NeverBacksOff(DynamicScale):
    def after_step(self, skipped: bool) -> None:
        before = self.scale
        super().after_step(skipped)
        self.scale = before if skipped else self.scale


class CountsSkippedSteps(DynamicScale):
    """A skipped step is one more on the way to growth."""

    def after_step(self, skipped: bool) -> None:
        before = self._growth_tracker
        super().after_step(skipped)
        self._growth_tracker = before + 1 if skipped else self._growth_tracker


class NeverGrows(DynamicScale):
    def after_step(self, skipped: bool) -> None:
        before = self.scale
        super().after_step(skipped)
        self.scale = min(before, self.scale)


class GrowsBeyondFinite(DynamicScale):
    def after_step(self, skipped: bool) -> None:
        count = self._growth_tracker
        super().after_step(skipped)
        if not skipped and count + 1 == self.growth_interval and self.scale >= 2.0**127:
            self.scale = torch.inf


class ForgetsItsCount(DynamicScale):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "_growth_tracker": 0})


class StepsAnyway(GradScaler):
    def _must_skip(self, turn: Any) -> bool:
        return super()._must_skip(turn) and bool(turn.stepped and self._in_update)

    _in_update = False

    def update(self, new_scale: float | None = None) -> None:
        self._in_update = True
        super().update(new_scale)
        self._in_update = False


class UnscalesTwice(GradScaler):
    def unscale_(self, trained: Any) -> None:
        super().unscale_(trained)
        unscaling.unscale(trained, self.get_scale())
        if isinstance(trained, ShadowOptimizer) and trained.gradient_factor is not None:
            trained.gradient_factor = self.get_scale() ** -2


class DecidesAlone(GradScaler):
    def unscale_(self, trained: Any) -> None:
        with patch.object(scaler, "_all_ranks", lambda: None):
            super().unscale_(trained)


def with_scale(kind: type[DynamicScale]) -> type[GradScaler]:
    class Faulty(GradScaler):
        def __init__(self, **options: Any):
            super().__init__(**options)
            self._now.__class__ = kind

    Faulty.__name__ = kind.__name__
    return Faulty


SCALES = {kind.__name__: with_scale(kind) for kind in (
    NeverBacksOff, CountsSkippedSteps, NeverGrows, GrowsBeyondFinite, ForgetsItsCount
)}  # fmt: skip
FAULTY = [*SCALES.values(), StepsAnyway, UnscalesTwice]


def is_torchs(world: None, faulty: type[GradScaler], check: Any) -> None:
    for seed in range(6):
        check(faulty, seed)


def trains_as_single(world: World, faulty: Any, check: Any, strategy: str, dtype: Any) -> None:
    check(world, strategy, dtype, faulty)


@replaces(master, "fp32_gradient")
def divides_in_fp16(real: Any, low: torch.Tensor, factor: float | None) -> torch.Tensor:
    """The small gradients underflow after all."""
    return low.mul_(factor or 1.0).float()


@replaces(master, "fp32_gradient")
def stays_scaled(real: Any, low: torch.Tensor, factor: float | None) -> torch.Tensor:
    return low.float()


ON_RANKS = [SCALES["NeverBacksOff"], SCALES["CountsSkippedSteps"], StepsAnyway, UnscalesTwice]
pair = {"size": 2, "timeout_s": 10}
test_a_faulty_scaler_differs_from_torchs = noticed(
    [Mutation(faulty, check_as_torch) for faulty in FAULTY], is_torchs, AssertionError
)
test_ranks_that_decide_alone_diverge = pytest.mark.slow(
    noticed(
        [Mutation(DecidesAlone, check_equal_to_single, strategy, torch.float64)
         for strategy in ("zero-1", "zero-2", "zero-3")],
        trains_as_single, **pair,
    )
)  # fmt: skip
test_a_faulty_scaler_trains_differently_on_ranks = pytest.mark.slow(
    noticed(
        [Mutation(faulty, check_equal_to_single, strategy, torch.float16)
         for strategy in ("ddp", "zero-2") for faulty in ON_RANKS],
        trains_as_single, AssertionError, **pair,
    )
)  # fmt: skip
test_16_bit_gradients_unscaled_wrongly_are_noticed = noticed(
    [Mutation(fault, held_by_fp16) for fault in (divides_in_fp16, stays_scaled)],
    here, AssertionError,
)  # fmt: skip
