"""ZeRO stages 1 and 2: each rank keeps the optimizer's state, and the gradients, of its share.

zero.py       the strategy: reduce-scatter in backward, step on a share, gather parameters
buckets.py    a bucket's gradients, and this rank's share of the averages; stage 2 frees the rest
shares.py     a bucket's parameters, this rank's share of them, and what it owns of everything
common/data_parallel.py says when a bucket leaves, for DDP and ZeRO alike
"""
