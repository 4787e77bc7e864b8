"""Communication as plain data: a `CommEvent` per operation, and the formulas of its bytes.

    payload_bytes   the size of the operation's tensor: S
    bus_bytes       bytes that must pass a rank's link by any algorithm: S x nccl-tests factor
    wire_bytes      bytes that this algorithm sent (through shared memory: copied)

Formulas and tests of a strategy use `bus_bytes`, which do not depend on the transport: the bytes
that each rank must send where all do the same (all-reduce, all-gather, reduce-scatter, all-to-all);
for operations with a root, those that pass the busiest link, on every rank. For all-gather and
reduce-scatter, S is the total of n shards. If n does not divide S, a rank's count follows the
chunks of a ring, so that the sum over the ranks is exact: 2(n-1)S for an all-reduce, (n-1)S for
its two halves. Source of the factors: nccl-tests, doc/PERFORMANCE.md.
No torch here: events are read, replayed and drawn without it.
"""

from dataclasses import dataclass


def chunk_sizes(numel: int, size: int) -> list[int]:
    """Cut `numel` elements into `size` chunks that differ by at most one; the first are larger.

    >>> chunk_sizes(10, 4)
    [3, 3, 2, 2]
    """
    base, larger = divmod(numel, size)
    return [base + (i < larger) for i in range(size)]


def all_reduce_bus_bytes(chunk_bytes: list[int], rank: int) -> int:
    """2(n-1)/n x S: a reduce-scatter and an all-gather."""
    return reduce_scatter_bus_bytes(chunk_bytes, rank) + all_gather_bus_bytes(chunk_bytes, rank)


def reduce_scatter_bus_bytes(chunk_bytes: list[int], rank: int) -> int:
    """(n-1)/n x S: every chunk but the one that ends on this rank."""
    return sum(chunk_bytes) - chunk_bytes[rank]


def all_gather_bus_bytes(chunk_bytes: list[int], rank: int) -> int:
    """(n-1)/n x S: every chunk but the next rank's, which has it already."""
    return sum(chunk_bytes) - chunk_bytes[(rank + 1) % len(chunk_bytes)]


@dataclass(slots=True)
class CommEvent:
    """One operation on one rank, as its communicator saw it. Times are seconds on the machine's
    monotonic clock, which its ranks share. `seq` counts a group's collectives, equally on all its
    ranks, or the messages of one direction and tag, equally on sender and receiver.
    A receive has `bus_bytes` 0: the sender counts them."""

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
    peer: int | None = None  # root of a broadcast, or the other end of a message
    tag: int = 0
    step: int = 0  # training step, if steps are counted
    transport: str = ""  # "shm", "gloo", "nccl" or "fake"
    lane: str = ""  # run by the "caller", the group's "lane", or the "backend"
    algorithm: str = ""  # "ring", "tree", ...; the backend's name if it chooses itself
    wire_bytes: int = 0  # known once the operation has ended
    issued_s: float = 0.0  # the strategy asked for it
    began_s: float = 0.0  # the transport started on it
    ended_s: float = 0.0  # the transport was done
    wait_began_s: float = 0.0  # the strategy waited for it ...
    wait_ended_s: float = 0.0  # ... until then


def ranks_in_words(size: int) -> str:
    """ "1 rank", "2 ranks", "1,024 ranks"."""
    return "1 rank" if size == 1 else f"{size:,} ranks"
