"""Tensor and sequence parallelism: every layer is cut, and all ranks compute on the same tokens.

tensor_parallel.py    the edit of a model; f and g stand in ../common/conjugate.py
linear.py             the two ways to cut a matrix: by columns and by rows
vocab.py              the embedding, the head and the loss, cut by the vocabulary
random_state.py       dropout that agrees on replicas and differs on parts
partitioned_activations.py   recomputation whose inputs are cut, too
validation.py, split_trial.py   which layers can be cut: asked, and tried
footprint.py          bytes held and moved
"""
