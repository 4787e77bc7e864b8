"""Numbers of fewer bits, and what keeps training with them right."""

from labkit.precision.master import MasterWeights

__all__ = ["MasterWeights"]
