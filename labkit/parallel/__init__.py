"""The strategies. One concept, one file."""

from labkit.parallel.ddp import DDP
from labkit.parallel.naive_ddp import NaiveDDP
from labkit.parallel.single import Single
from labkit.parallel.zero import ZeroOptimizer
from labkit.parallel.zero3 import ZeRO3

__all__ = ["DDP", "NaiveDDP", "Single", "ZeRO3", "ZeroOptimizer"]
