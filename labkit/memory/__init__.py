"""Activation memory in training: recompute it, offload it, and count the cost."""
