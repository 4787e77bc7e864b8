"""A faulty loss scaler must turn its proofs red."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness import Mutation, around, here, instead, noticed, replaces
from labkit import GradScaler
from labkit.precision import master, scaler, unscaling
from labkit.precision.dynamic_scale import DynamicScale
from labkit.precision.shadow_optimizer import ShadowOptimizer
from scaler_contract import check_as_torch, check_equal_to_single
from test_scaler import test_gradients_that_fp16_cannot_hold_reach_the_masters as held_by_fp16


@replaces(DynamicScale, "after_step")
def never_backs_off(real: Any, self: DynamicScale, skipped: bool) -> None:
    before = self.scale
    real(self, skipped)
    self.scale = before if skipped else self.scale


@replaces(DynamicScale, "after_step")
def counts_skipped_steps(real: Any, self: DynamicScale, skipped: bool) -> None:
    """A skipped step is one more on the way to growth."""
    before = self._growth_tracker
    real(self, skipped)
    self._growth_tracker = before + 1 if skipped else self._growth_tracker


@replaces(DynamicScale, "after_step")
def never_grows(real: Any, self: DynamicScale, skipped: bool) -> None:
    before = self.scale
    real(self, skipped)
    self.scale = min(before, self.scale)


@replaces(DynamicScale, "after_step")
def grows_beyond_finite(real: Any, self: DynamicScale, skipped: bool) -> None:
    count = self._growth_tracker
    real(self, skipped)
    if not skipped and count + 1 == self.growth_interval and self.scale >= 2.0**127:
        self.scale = torch.inf


@replaces(DynamicScale, "load_state_dict")
def forgets_its_count(real: Any, self: DynamicScale, state: dict[str, Any]) -> None:
    real(self, {**state, "_growth_tracker": 0})


@replaces(GradScaler, "step")
def steps_anyway(real: Any, self: GradScaler, optimizer: Any) -> Any:
    with patch.object(GradScaler, "_must_skip", lambda self, turn: False):
        return real(self, optimizer)


@replaces(GradScaler, "unscale_")
def unscales_twice(real: Any, self: GradScaler, trained: Any) -> None:
    real(self, trained)
    unscaling.unscale(trained, self.get_scale())
    if isinstance(trained, ShadowOptimizer) and trained.gradient_factor is not None:
        trained.gradient_factor = self.get_scale() ** -2


decides_alone = instead("decides_alone", scaler, "_all_ranks", lambda: None)


@replaces(master, "fp32_gradient")
def divides_in_fp16(real: Any, low: torch.Tensor, factor: float | None) -> torch.Tensor:
    """The small gradients underflow after all."""
    return low.mul_(factor or 1.0).float()


@replaces(master, "fp32_gradient")
def stays_scaled(real: Any, low: torch.Tensor, factor: float | None) -> torch.Tensor:
    return low.float()


def is_torchs() -> None:
    for seed in range(6):
        check_as_torch(seed)


ON_RANKS = [never_backs_off, counts_skipped_steps, steps_anyway, unscales_twice]
FAULTY = [*ON_RANKS, never_grows, grows_beyond_finite, forgets_its_count]
pair = {"size": 2, "timeout_s": 10}
test_a_faulty_scaler_differs_from_torchs = noticed(
    [Mutation(fault, is_torchs) for fault in FAULTY], here, AssertionError
)
test_ranks_that_decide_alone_diverge = pytest.mark.slow(
    noticed(
        [Mutation(decides_alone, check_equal_to_single, strategy, torch.float64)
         for strategy in ("zero-1", "zero-2", "zero-3")],
        around, **pair,
    )
)  # fmt: skip
test_a_faulty_scaler_trains_differently_on_ranks = pytest.mark.slow(
    noticed(
        [Mutation(fault, check_equal_to_single, strategy, torch.float16)
         for strategy in ("ddp", "zero-2") for fault in ON_RANKS],
        around, AssertionError, **pair,
    )
)  # fmt: skip
test_16_bit_gradients_unscaled_wrongly_are_noticed = noticed(
    [Mutation(fault, held_by_fp16) for fault in (divides_in_fp16, stays_scaled)],
    here, AssertionError,
)  # fmt: skip
