"""Building blocks that several strategies share.

ownership.py          checks on a wrapped module: equal on all ranks, one owner, unchanged
data_parallel.py      replicas; sending gradient buckets while backward runs
flat.py               tensors in one flat buffer, split into equal shares; gradient buffers
elementwise.py        tests whether an optimizer can be sharded
sharder.py            protocols for clipping, checkpoints and pipelines; full state dicts
held.py               measures the bytes that a rank holds
shards.py             marks parameters that are shards of a larger tensor
conjugate.py          collectives paired with the collective of their backward: f, g, ...
clipping.py           gradient clipping by global norm under any strategy
"""
