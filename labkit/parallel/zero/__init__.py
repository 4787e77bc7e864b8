"""ZeRO stages 1 and 2: each rank keeps the optimizer's state, and the gradients, of its share.

zero.py                the strategy: reduce-scatter in backward, step on a share, gather parameters
param_share.py         a bucket's parameters in flat memory, and this rank's share of them
buckets.py             its gradients, and this rank's share of the averages; stage 2 frees the rest
param_gather.py        the new parameters, gathered while the next forward runs
state.py               which part of everything a rank owns: for clipping, checkpoints, pipelines
gradient_in_pieces.py  the `.grad` of a parameter whose gradient is sharded
footprint.py           bytes held and moved

When a bucket leaves is said in common/grad_reducer.py, for DDP and ZeRO alike.
"""
