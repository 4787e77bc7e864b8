"""Context parallelism: context_parallel.py edits a model; zigzag.py shards its sequences."""
