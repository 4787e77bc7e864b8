"""ZeRO stages 1 and 2: optimizer state, and in stage 2 gradients, are sharded over the ranks.

zero.py       the strategy: reduce-scatter in backward, step on a share, all-gather parameters
buckets.py    gradients of a bucket and this rank's share of their averages
shares.py     parameters of a bucket and this rank's share of parameters and optimizer state
common/data_parallel.py   when buckets are sent, for DDP and ZeRO alike
"""
