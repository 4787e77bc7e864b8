"""Distributed data parallelism: replicas whose gradients are averaged while backward runs.

ddp.py            the strategy: buckets leave as soon as their last gradient is there
buckets.py        a bucket: one flat tensor, a view of it for each gradient
bucket_order.py   the order in which gradients come, learned in the first backward
comm_hooks.py     how a bucket travels: compressed, or by a hook of yours
joining.py        ranks whose data ends early
"""
