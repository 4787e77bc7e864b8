"""A dynamic loss scale: it grows while steps succeed, and backs off on overflow.

    scale
      2^17 |                     ______x                x  inf or NaN: the step is skipped,
      2^16 |______x             |      |_______            scale <- scale * backoff_factor
      2^15 |      |_____________|                       |  growth_interval good steps in a row:
           +-------------------------------- steps         scale <- scale * growth_factor

Source: torch.amp.GradScaler (rule, rounding and state); Micikevicius et al., "Mixed Precision
Training", arXiv 1710.03740, section 3.2.
"""

from ctypes import c_float
from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Any

MAX_SKIPS = 20  # in a row, with the scale below 1 (65536 halved 17 times)


@dataclass
class DynamicScale:
    """The scale and its update rule. Raises ValueError if an argument is out of range."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int = 0  # good steps since the scale last changed

    def __post_init__(self) -> None:
        if isinstance(self.scale, str):
            raise ValueError(
                f"GradScaler({self.scale!r}): labkit's scaler uses the device of the gradients; "
                "omit the device: GradScaler(init_scale=65536.0)"
            )
        ranges = {
            "scale": (0 < self.scale < inf, "a finite number above 0, usually 65536"),
            "growth_factor": (1 < self.growth_factor < inf, "a number above 1, usually 2"),
            "backoff_factor": (0 < self.backoff_factor < 1, "a number in (0, 1), usually 0.5"),
            "growth_interval": (self.growth_interval >= 1, "1 step or more, usually 2000"),
            "_growth_tracker": (self._growth_tracker >= 0, "0 steps or more"),
        }
        for name, (is_valid, expected) in ranges.items():
            if not is_valid:
                raise ValueError(f"GradScaler: {name}={getattr(self, name)}; choose {expected}")
        self.scale = _fp32(self.scale)
        self.skipped = self.skipped_in_a_row = 0  # steps

    def after_step(self, skipped: bool) -> None:
        if skipped:
            self.scale = _fp32(self.scale * self.backoff_factor)
            self._growth_tracker = 0
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
            return
        self.skipped_in_a_row = 0
        self._growth_tracker += 1
        if self._growth_tracker >= self.growth_interval:
            self._growth_tracker = 0
            grown = _fp32(self.scale * self.growth_factor)
            self.scale = grown if isfinite(grown) else self.scale

    def check_can_recover(self) -> None:
        """Raise ValueError if repeated back-offs have not stopped the overflow."""
        if self.skipped_in_a_row >= MAX_SKIPS and self.scale < 1:
            raise ValueError(
                f"GradScaler: {self.skipped_in_a_row} steps in a row were skipped, and the scale "
                f"is down to {self.scale:g}, so the gradients are inf or NaN at any scale. "
                "Look for NaN in the weights with labkit.find_nonfinite(model, *batch), inside "
                "the same autocast region as the forward; go back to a checkpoint with a lower "
                "learning rate or clipped gradients, or train in bfloat16"
            )

    # --- state: keys and values of torch.amp.GradScaler ---

    def state_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for an invalid state, leaving the current state unchanged."""
        known = [f.name for f in fields(self)]
        if not isinstance(state, dict) or set(state) != set(known):
            names = ", ".join(map(str, state)) or "nothing (it was saved with enabled=False)"
            raise ValueError(
                f"GradScaler.load_state_dict: this state has {names}; load the result of "
                f"state_dict(), which has {', '.join(known)}"
            )
        loaded = DynamicScale(**state)
        for name in known:
            setattr(self, name, getattr(loaded, name))


def _fp32(x: float) -> float:
    """Round to fp32 (inf on overflow): torch keeps the scale in an fp32 tensor."""
    return c_float(x).value
