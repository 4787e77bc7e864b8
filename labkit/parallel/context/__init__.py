"""Context parallelism: every rank has the whole model and a part of each sequence.

    tokens     the quick brown │ fox jumps over      one sequence of s tokens, on 2 ranks
    rank 0     the             │           over      chunks 0 and 3 of 4
    rank 1         quick brown │ fox jumps           chunks 1 and 2

context_parallel.py   the edit of a model: attention alone looks across tokens
zigzag.py             which tokens are a rank's
ring_attention.py     way="ring": blocks of keys and values travel past the queries
ulysses.py            way="ulysses": ranks swap tokens for heads, and back
"""
