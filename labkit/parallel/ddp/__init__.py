"""Distributed data parallelism: replicas whose gradients are averaged while backward runs.

ddp.py            the strategy: an all-reduce for each bucket, `join`, `no_sync`
buckets.py        a bucket, and the order in which buckets are filled
comm_hooks.py     how a bucket travels: compressed, or by a hook of yours
joining.py        ranks whose data ends early

When a bucket leaves is said in common/grad_reducer.py, for DDP and ZeRO alike.
"""
