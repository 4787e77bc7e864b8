"""What several strategies are made of.

ownership.py          a module taken over: the same on all ranks, of one strategy, unchanged
data_parallel.py      replicas; when buckets of gradients leave, while backward runs
flat.py               tensors in one flat buffer, cut into equal shares; gradients collected there
elementwise.py        can an optimizer be sharded? tried before it is
sharder.py            what strategies owe clipping, checkpoints and pipelines: protocols; a model
                      whose parameters are cut, put together again
held.py               bytes that a rank holds, counted
shards.py             marks of parameters of which a rank has a part
conjugate.py          exchanges whose backward is another exchange: f, g, gather, scatter
clipping.py           the norm of all gradients, wherever they are
"""
