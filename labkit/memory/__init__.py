"""What training keeps in memory, what can be made again or moved away, and what moving costs."""
