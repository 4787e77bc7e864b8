"""A faulty loss scaler must turn its proofs red: a test that cannot fail proves nothing."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from labkit import GradScaler, World
from labkit.precision import scaler, unscaling
from labkit.precision.dynamic_scale import DynamicScale
from labkit.precision.shadow_optimizer import ShadowOptimizer
from labkit.runtime.errors import RankError
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

    return Faulty


SCALES = [NeverBacksOff, CountsSkippedSteps, NeverGrows, GrowsBeyondFinite, ForgetsItsCount]
FAULTY = [*map(with_scale, SCALES), StepsAnyway, UnscalesTwice]
NAMES = [*(kind.__name__ for kind in SCALES), "StepsAnyway", "UnscalesTwice"]


@pytest.mark.parametrize("faulty", FAULTY, ids=NAMES)
def test_a_faulty_scaler_is_not_as_torchs(faulty: type[GradScaler]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(6):
            check_as_torch(faulty, seed)


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=10) as world:
        yield world


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero-1", "zero-2", "zero-3"])
def test_ranks_that_decide_alone_part(pair: World, strategy: str) -> None:
    with pytest.raises((AssertionError, RankError)):
        check_equal_to_single(pair, strategy, torch.float64, DecidesAlone)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero-2"])
@pytest.mark.parametrize(
    "faulty",
    [with_scale(NeverBacksOff), with_scale(CountsSkippedSteps), StepsAnyway, UnscalesTwice],
    ids=["NeverBacksOff", "CountsSkippedSteps", "StepsAnyway", "UnscalesTwice"],
)
def test_a_faulty_scaler_trains_otherwise_on_ranks(
    pair: World, faulty: type[GradScaler], strategy: str
) -> None:
    with pytest.raises(AssertionError):
        check_equal_to_single(pair, strategy, torch.float16, faulty)


def in_fp16(low: torch.Tensor, factor: float | None) -> torch.Tensor:
    """Divided where they lie, the small ones underflow after all."""
    return low.mul_(factor or 1.0).float()


def still_scaled(low: torch.Tensor, factor: float | None) -> torch.Tensor:
    return low.float()


@pytest.mark.parametrize("faulty", [in_fp16, still_scaled])
def test_16_bit_gradients_unscaled_otherwise_turn_red(
    faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.precision.master.fp32_gradient", faulty)
    with pytest.raises(AssertionError):
        held_by_fp16()
