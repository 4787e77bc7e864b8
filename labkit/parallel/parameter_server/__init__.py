"""Parameter server: rank 0 runs the optimizer; workers push gradients and pull weights.

synchronous.py        all ranks step together
asynchronous.py       workers push independently; the server steps on stale gradients
"""
