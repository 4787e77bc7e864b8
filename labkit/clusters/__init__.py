"""Clusters as plain data: device rates, bandwidths, latencies, and the source of each number."""

from labkit.clusters.cluster import Cluster, Device, Level
from labkit.clusters.files import cluster, known_clusters, read_clusters, write_clusters

__all__ = [
    "Cluster", "Device", "Level", "cluster", "known_clusters", "read_clusters", "write_clusters",
]  # fmt: skip
