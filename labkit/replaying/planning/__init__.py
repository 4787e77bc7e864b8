"""Model parallelism at scale: what a layout costs on a cluster, and which to choose."""
