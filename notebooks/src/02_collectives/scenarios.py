"""Two ring all-reduces for lab 02, each with a bug. Draw the movement before you read this."""

from typing import Any

import torch


def pass_on(comm: Any, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to the next rank and receive from the previous rank, at the same time."""
    handle = comm.isend(outgoing, (comm.rank + 1) % comm.size)
    comm.recv(incoming, (comm.rank - 1) % comm.size)
    handle.wait()


def ring_a(comm: Any, x: torch.Tensor) -> None:
    """A ring all-reduce with a bug that the drawing shows."""
    n, chunks = comm.size, x.tensor_split(comm.size)
    for step in range(1, n + 1):
        give, take = chunks[(comm.rank - step) % n], chunks[(comm.rank - step - 1) % n]
        arrived = torch.empty_like(take)
        pass_on(comm, give, arrived)
        take += arrived


def ring_b(comm: Any, x: torch.Tensor) -> None:
    """A ring all-reduce with a different bug."""
    n, chunks = comm.size, x.tensor_split(comm.size)
    for step in range(1, n):
        give, take = chunks[(comm.rank - step) % n], chunks[(comm.rank - step - 1) % n]
        arrived = torch.empty_like(take)
        pass_on(comm, give, arrived)
        take += arrived
    for step in range(1, n):
        give, take = chunks[(comm.rank - step) % n], chunks[(comm.rank - step - 1) % n]
        pass_on(comm, give, take)
