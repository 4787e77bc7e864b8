"""What the strategies are made of: buckets, flat partitions, hooks, agreement of ranks."""
