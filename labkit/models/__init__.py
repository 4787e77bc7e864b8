"""Small models in plain torch, independent of ranks: parallelism is applied from outside."""

from labkit.models.attention import PlainAttention
from labkit.models.gpt import GPT
from labkit.models.mlp import MLP

__all__ = ["GPT", "MLP", "PlainAttention"]
