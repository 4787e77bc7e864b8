"""ZeRO stages 1 and 2: shard optimizer state and, in stage 2, gradients over the ranks.

zero.py       the strategy: reduce-scatter in backward, step on a share, all-gather parameters
buckets.py    a bucket's gradients and this rank's share of the averages
shares.py     a bucket's parameters and this rank's share of parameters and optimizer state
common/data_parallel.py   bucket scheduling, shared by DDP and ZeRO
"""
