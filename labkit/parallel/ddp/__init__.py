"""Distributed data parallelism: replicas that average gradients while backward runs.

ddp.py            the strategy: an all-reduce per bucket; `join`, `no_sync`
extras.py         bucket order by arrival, static graphs, uneven inputs (`join`)
comm_hooks.py     how buckets are reduced: compression, custom hooks
common/data_parallel.py   when buckets are sent, for DDP and ZeRO alike
"""
