"""What travels, as plain data: one `CommEvent` per operation, and the formulas of its bytes.

    payload_bytes   how large is the tensor the operation is about?   S
    bus_bytes       what must pass a rank's link, whatever the algorithm?  S x nccl-tests factor
    wire_bytes      what did the algorithm used here really send? (through shared memory: copy)

Formulas and tests of a strategy use `bus_bytes`, since they do not depend on the transport: what
each rank must send where all do the same (all-reduce, all-gather, reduce-scatter, all-to-all); for
operations with a root what passes the busiest link, on every rank. For all-gather and
reduce-scatter, S is the total size: n shards. Where S does not divide by n, a rank's count follows
the chunks that a ring would make it send, so that the sum over the ranks is exact: 2(n-1)S for an
all-reduce, (n-1)S for its two halves. Source of the factors: nccl-tests, doc/PERFORMANCE.md. No
torch here: events are read, replayed and drawn without it.
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
    """2(n-1)/n x S: all chunks but one on the way in, all chunks but one on the way out."""
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
    monotonic clock, which all ranks of one machine share.

    `seq` counts the collectives of a group, equal on all its ranks; for point to point it counts
    the messages of one direction and tag, equal on sender and receiver.
    A receive has `bus_bytes` 0: bytes are counted where they are sent.
    """

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
    step: int = 0  # of the training, where steps are counted
    transport: str = ""  # what carried it: "shm", "gloo", "nccl", or "fake"
    lane: str = ""  # who carried it: "caller" itself, the "lane" of the group, or the "backend"
    algorithm: str = ""  # "ring", "tree", ...; the backend's name where it chooses itself
    wire_bytes: int = 0  # known when the operation has ended
    issued_s: float = 0.0  # the strategy asked for it
    began_s: float = 0.0  # the transport started on it
    ended_s: float = 0.0  # the transport was done
    wait_began_s: float = 0.0  # the strategy stood still for it ...
    wait_ended_s: float = 0.0  # ... until then


def ranks_in_words(size: int) -> str:
    """ "1 rank", "2 ranks", "1,024 ranks"."""
    return "1 rank" if size == 1 else f"{size:,} ranks"
