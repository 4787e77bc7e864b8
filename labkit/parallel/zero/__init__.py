"""ZeRO stages 1 and 2: each rank keeps the optimizer's state, and the gradients, of its share.

zero.py                the strategy: step on one's share, gather the parameters
grad_reduce.py         backward: reduce-scatters of buckets to the ranks that own their shares
buckets.py             a bucket, of stage 1 and of stage 2, which frees its gradients
param_gather.py        the new parameters, gathered while the next forward runs
gradient_in_pieces.py  the `.grad` of a parameter whose gradient is sharded
elementwise.py         does an optimizer treat every element by itself? tried before sharding
footprint.py           bytes held and moved
"""
