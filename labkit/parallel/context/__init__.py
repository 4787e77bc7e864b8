"""Context parallelism: every rank has the whole model and a part of each sequence.

context_parallel.py   the edit of a model: attention alone looks across tokens
zigzag.py             which tokens are a rank's
ring_attention.py     way="ring": blocks of keys and values travel past the queries
ulysses.py            way="ulysses": ranks swap tokens for heads, and back
"""
