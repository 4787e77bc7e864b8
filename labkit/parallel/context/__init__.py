"""Context parallelism: every rank holds the full model and a part of each sequence.

context_parallel.py   edits a model: only attention looks across tokens
zigzag.py             which tokens each rank holds
ring_attention.py     way="ring": blocks of keys and values travel past the queries
ulysses.py            way="ulysses": ranks exchange tokens for heads, and back
"""
