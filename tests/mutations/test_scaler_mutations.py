"""A faulty loss scaler must turn its proofs red."""

import pytest
import torch

from harness import Mutation, around, edits, here, noticed
from labkit.precision import dynamic_scale, master, scaler
from scaler_contract import check_as_torch, check_equal_to_single
from test_scaler import test_gradients_that_fp16_cannot_hold_reach_the_masters as held_by_fp16


def is_torchs() -> None:
    for seed in range(6):
        check_as_torch(seed)


FAULTS = [
    *edits(
        dynamic_scale,
        ("never backs off", "_fp32(self.scale * self.backoff_factor)", "self.scale", is_torchs),
        ("counts skipped steps towards growth",
         "self._growth_tracker = 0\n            self.skipped",
         "self._growth_tracker += 1\n            self.skipped", is_torchs),
    ),
    *edits(
        scaler,
        ("steps anyway", "if not self._must_skip(pending):", "if True:", is_torchs),
        ("unscales twice",
         "unscale(trained, self._scale.scale)", "unscale(trained, self._scale.scale**2)",
         is_torchs),
    ),
]  # fmt: skip
RARE_FAULTS = edits(
    dynamic_scale,
    ("never grows", "self.scale = grown if isfinite(grown) else self.scale", "pass", is_torchs),
    ("grows beyond finite", "grown if isfinite(grown) else self.scale", "grown", is_torchs),
    ("forgets its count",
     "DynamicScale(**state)", 'DynamicScale(**{**state, "_growth_tracker": 0})', is_torchs),
)  # fmt: skip
DECIDES_ALONE = "decides alone", "self.comm or _all_ranks()", "self.comm", check_equal_to_single
CAST = "fp32_gradient(p.grad, self.gradient_factor)"
pair = {"size": 2, "timeout_s": 10}
test_a_faulty_scaler_differs_from_torchs = noticed([*FAULTS, *RARE_FAULTS], here, AssertionError)
test_ranks_that_decide_alone_diverge = pytest.mark.slow(
    noticed(
        edits(
            scaler,
            *((*DECIDES_ALONE, zero, torch.float64) for zero in ("zero-1", "zero-2", "zero-3")),
        ),
        around, **pair,
    )
)  # fmt: skip
test_a_faulty_scaler_trains_differently_on_ranks = pytest.mark.slow(
    noticed(
        [Mutation(mutation.fault, check_equal_to_single, strategy, torch.float16)
         for strategy in ("ddp", "zero-2") for mutation in FAULTS],
        around, AssertionError, **pair,
    )
)  # fmt: skip
test_16_bit_gradients_unscaled_wrongly_are_noticed = noticed(
    edits(
        master,
        ("divides in fp16",  # the small gradients underflow after all
         CAST, "p.grad.mul_(self.gradient_factor or 1.0).float()", held_by_fp16),
        ("stays scaled", CAST, "p.grad.float()", held_by_fp16),
    ),
    here, AssertionError,
)  # fmt: skip
