"""Communication as plain data: a `CommEvent` per operation, and the formulas for its bytes.

    payload_bytes   the size of the operation's tensor: S
    bus_bytes       bytes that must cross a rank's link with any algorithm: S x nccl-tests factor
    wire_bytes      bytes that the algorithm in use sent (with shared memory: copied)

A strategy's formulas and tests use `bus_bytes`, which do not depend on the transport. For symmetric
operations (all-reduce, all-gather, reduce-scatter, all-to-all), they are the bytes that each rank
must send; for operations with a root, every rank counts the bytes on the busiest link. For
all-gather and reduce-scatter, S is the total of n shards. If S is not divisible by n, a rank counts
the chunks it sends in a ring, so that the sum over ranks is exact: 2(n-1)S for an all-reduce,
(n-1)S for each of its two halves. Source of the factors: nccl-tests, doc/PERFORMANCE.md.
This module does not import torch, so that events can be read, replayed and drawn without torch.
"""

from dataclasses import dataclass


def chunk_sizes(numel: int, size: int) -> list[int]:
    """Split `numel` elements into `size` chunk sizes that differ by at most one, larger first.

    >>> chunk_sizes(10, 4)
    [3, 3, 2, 2]
    """
    base, larger = divmod(numel, size)
    return [base + (i < larger) for i in range(size)]


def all_reduce_bus_bytes(chunk_bytes: list[int], rank: int) -> int:
    """2(n-1)/n x S: a reduce-scatter and an all-gather."""
    return reduce_scatter_bus_bytes(chunk_bytes, rank) + all_gather_bus_bytes(chunk_bytes, rank)


def reduce_scatter_bus_bytes(chunk_bytes: list[int], rank: int) -> int:
    """(n-1)/n x S: every chunk except the one reduced on this rank."""
    return sum(chunk_bytes) - chunk_bytes[rank]


def all_gather_bus_bytes(chunk_bytes: list[int], rank: int) -> int:
    """(n-1)/n x S: every chunk except that of the next rank, the receiver."""
    return sum(chunk_bytes) - chunk_bytes[(rank + 1) % len(chunk_bytes)]


@dataclass(slots=True)
class CommEvent:
    """One operation on one rank, as seen by its communicator. Times are seconds of the machine's
    monotonic clock, which all ranks on a machine share. `seq` numbers the group's collectives, or
    the messages per direction and tag; participating ranks agree on the number.
    A receive has `bus_bytes` 0: the sender counts the bytes."""

    op: str
    group: str
    ranks: tuple[int, ...]  # global ranks of the group
    rank: int  # this rank, inside the group
    seq: int
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    bus_bytes: int
    blocking: bool
    source: str = ""  # "file.py:12 in train"
    peer: int | None = None  # root of a collective, or the other end of a message
    tag: int = 0
    step: int = 0  # training step, if steps are counted
    transport: str = ""  # "shm", "gloo", "nccl" or "fake"
    lane: str = ""  # where it ran: "caller", "lane" (of the group) or "backend"
    algorithm: str = ""  # "ring", "tree", ...; the backend's name if the backend chooses
    wire_bytes: int = 0  # known once the operation has ended
    issued_s: float = 0.0  # when the strategy called the operation
    began_s: float = 0.0  # when the transport started
    ended_s: float = 0.0  # when the transport finished
    wait_began_s: float = 0.0  # when the strategy began to wait ...
    wait_ended_s: float = 0.0  # ... and stopped waiting


def ranks_in_words(size: int) -> str:
    """ "1 rank", "2 ranks", "1,024 ranks"."""
    return "1 rank" if size == 1 else f"{size:,} ranks"
