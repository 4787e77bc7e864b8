"""`python -m labkit`, and `torchrun ... -m labkit run ddp`."""

from labkit.cli import main

main()
