"""Context parallelism: every rank has the whole model and a part of each sequence.

context_parallel.py   the edit of a model: attention alone looks across tokens
zigzag.py             which tokens are a rank's
ring_attention.py     keys and values travel around a ring
ulysses.py            tokens are swapped for heads, and back
"""
