"""What several strategies are made of.

replicas.py           a module on all ranks: equal at the beginning, its hooks, its copies
agreement.py          do the ranks train the same? is a parameter another strategy's?
grad_buffer.py        gradients in one flat tensor: filled, flagged
grad_reducer.py       when buckets of gradients leave, while backward runs
flat.py               parameters in one flat tensor, cut into equal shares
conjugate.py          exchanges whose backward is another exchange: f, g, gather, scatter
shards.py             marks of parameters of which a rank has a part
elementwise.py        can an optimizer be sharded? tried before it is
in_stages.py          models of which each rank has some layers
clipping.py           the norm of all gradients, wherever they are
whole.py              whole parameters of a sharded model
footprint.py          bytes that a rank holds, predicted; held.py: counted
sharder.py            what strategies owe clipping, checkpoints and pipelines: protocols
"""
