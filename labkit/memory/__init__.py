"""What training keeps in memory, how to recompute or offload it, and what that costs."""
