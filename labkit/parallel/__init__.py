"""The strategies. One concept, one file; what several of them need is in `parts`."""

from labkit.parallel.async_parameter_server import AsyncParameterServer
from labkit.parallel.context import context_parallel
from labkit.parallel.ddp import DDP
from labkit.parallel.naive_ddp import NaiveDDP
from labkit.parallel.parameter_server import ParameterServer
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.single import Single
from labkit.parallel.stages import split
from labkit.parallel.tensor import tensor_parallel
from labkit.parallel.zero import ZeroOptimizer
from labkit.parallel.zero3 import ZeRO3

__all__ = [
    "DDP",
    "AsyncParameterServer",
    "NaiveDDP",
    "ParameterServer",
    "Pipeline",
    "Single",
    "ZeRO3",
    "ZeroOptimizer",
    "context_parallel",
    "split",
    "tensor_parallel",
]
