"""Clusters as plain data: what a device computes, what a wire carries, and who said so."""

from labkit.clusters.cluster import Cluster, Device, Level
from labkit.clusters.files import cluster, known_clusters, read_clusters, write_clusters

__all__ = [
    "Cluster", "Device", "Level", "cluster", "known_clusters", "read_clusters", "write_clusters",
]  # fmt: skip
