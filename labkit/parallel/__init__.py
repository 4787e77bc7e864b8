"""Parallel strategies, one folder or file per strategy; shared code is in `common`."""

from labkit.parallel.common.clipping import clip_grad_norm_
from labkit.parallel.context.context_parallel import context_parallel
from labkit.parallel.ddp.ddp import DDP
from labkit.parallel.naive_ddp import NaiveDDP
from labkit.parallel.parameter_server.asynchronous import AsyncParameterServer
from labkit.parallel.parameter_server.synchronous import ParameterServer
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.single import Single
from labkit.parallel.splitting import split
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.parallel.zero.zero import ZeroOptimizer
from labkit.parallel.zero3.zero3 import ZeRO3

# Assigned here because clipping uses sharders only through a protocol (common/sharder.py).
ZeroOptimizer.clip_grad_norm_ = clip_grad_norm_
ZeRO3.clip_grad_norm_ = clip_grad_norm_

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
