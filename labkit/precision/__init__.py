"""Numbers of fewer bits, and what keeps training with them right."""

from labkit.precision.accumulation import Fp32Gradients
from labkit.precision.autocasting import autocast
from labkit.precision.formats import FORMATS, Format, rounded
from labkit.precision.fp8 import Fp8Linear, use_fp8
from labkit.precision.int8_blocks import Int8Blocks
from labkit.precision.master import MasterWeights
from labkit.precision.nonfinite import find_nonfinite
from labkit.precision.scaler import GradScaler

__all__ = [
    "FORMATS",
    "Format",
    "Fp8Linear",
    "Fp32Gradients",
    "GradScaler",
    "Int8Blocks",
    "MasterWeights",
    "autocast",
    "find_nonfinite",
    "rounded",
    "use_fp8",
]
