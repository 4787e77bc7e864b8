"""Two rings of lab 02 with a bug each. Students see how they move, and only then this file."""

from typing import Any

import torch


def pass_on(comm: Any, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Give to the next rank and take from the one before, at the same time."""
    handle = comm.isend(outgoing, (comm.rank + 1) % comm.size)
    comm.recv(incoming, (comm.rank - 1) % comm.size)
    handle.wait()


def ring_a(comm: Any, x: torch.Tensor) -> None:
    """An all-reduce by a ring, with a mistake that its picture shows."""
    n, chunks = comm.size, x.tensor_split(comm.size)
    for step in range(1, n + 1):
        give, take = chunks[(comm.rank - step) % n], chunks[(comm.rank - step - 1) % n]
        arrived = torch.empty_like(take)
        pass_on(comm, give, arrived)
        take += arrived


def ring_b(comm: Any, x: torch.Tensor) -> None:
    """Another, with another mistake."""
    n, chunks = comm.size, x.tensor_split(comm.size)
    for step in range(1, n):
        give, take = chunks[(comm.rank - step) % n], chunks[(comm.rank - step - 1) % n]
        arrived = torch.empty_like(take)
        pass_on(comm, give, arrived)
        take += arrived
    for step in range(1, n):
        give, take = chunks[(comm.rank - step) % n], chunks[(comm.rank - step - 1) % n]
        pass_on(comm, give, take)
