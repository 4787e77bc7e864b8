"""Tensor and sequence parallelism: tensor_parallel.py edits a model; layers.py has the layers."""
