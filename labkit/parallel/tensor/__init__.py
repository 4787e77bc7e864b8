"""Tensor and sequence parallelism: tensor_parallel.py edits models, layers.py shards layers."""
