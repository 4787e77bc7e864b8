"""A parameter server: rank 0 keeps the optimizer, the others push gradients and pull weights.

synchronous.py        all ranks step together
asynchronous.py       each pushes when it is ready; the server steps on stale gradients
"""
