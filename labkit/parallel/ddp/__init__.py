"""Distributed data parallelism: replicas that average gradients while backward runs.

ddp.py            the strategy: an all-reduce per bucket; `join`, `no_sync`
extras.py         bucket order by arrival, static graphs, uneven inputs (`join`)
comm_hooks.py     bucket reduction: compression, custom hooks
common/data_parallel.py   bucket scheduling, shared by DDP and ZeRO
"""
