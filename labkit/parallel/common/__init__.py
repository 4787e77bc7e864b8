"""Building blocks shared by the strategies.

ownership.py          checks a wrapped module: same parameters on all ranks, one owner, unchanged
data_parallel.py      replicas; gradient buckets reduced while backward runs
flat.py               tensors in one flat buffer, split into equal shares; gradient buffers
elementwise.py        tests whether an optimizer can be sharded
sharder.py            protocols for clipping, checkpoints and pipelines; full state dicts
held.py               measures the bytes that a rank holds
shards.py             marks parameters that are shards of a larger tensor
conjugate.py          collectives and their backward collectives: f, g, ...
clipping.py           gradient clipping by global norm under any strategy
"""
