"""Memory: recompute or offload activations, load weights over a bus, and measure the cost."""
