"""Tensor and sequence parallelism: every layer is cut, and all ranks compute on the same tokens.

tensor_parallel.py    the edit of a model; f and g: ../common/conjugate.py
layers.py             what is cut: matrices, the embedding, the head and the loss
validation.py         which layers can be cut: asked, and tried; the same input on all ranks
"""
