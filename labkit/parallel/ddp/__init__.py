"""Distributed data parallelism: replicas whose gradients are averaged while backward runs.

ddp.py            the strategy: an all-reduce for each bucket; `join`, `no_sync`
extras.py         buckets in the order of arrival, static graphs, ranks whose data ends early
comm_hooks.py     how a bucket travels: compressed, or by a hook of yours
common/data_parallel.py   when a bucket leaves, for DDP and ZeRO alike
"""
