"""The collectives, written from send and receive.

Each function runs on every rank of the group at once, blocks until this rank is done, and
returns the bytes this rank sent. `tag` keeps the messages of one operation apart from those of
the next; messages between two ranks under one tag arrive in the order they were sent.

Shapes: n ranks, S bytes; `chunks` is a list of n flat tensors, chunk i belonging to rank i.
Cost: alpha = latency of a message, beta = seconds per byte.
Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005.
"""

from collections.abc import Callable

import torch

from labkit.comm.wire import Wire

Chunks = list[torch.Tensor]
Reduction = Callable[[torch.Tensor, torch.Tensor], object]  # reduces the second into the first


def ring_reduce_scatter(wire: Wire, chunks: Chunks, reduce: Reduction, tag: int) -> int:
    """Afterwards chunk r on rank r holds the reduction of all; the others hold partial sums.

    n - 1 steps: pass on the chunk that just got richer. With 3 ranks, + marking who has added:

        step     rank 0            rank 1            rank 2
        1        sends c2 (0)      sends c0 (1)      sends c1 (2)
        2        sends c1 (2+0)    sends c2 (0+1)    sends c0 (1+2)
        after    has c0 (1+2+0)    has c1 (2+0+1)    has c2 (0+1+2)

    Cost: (n-1) alpha + (n-1)/n S beta.
    """
    n, rank = wire.size, wire.rank
    arriving = torch.empty_like(max(chunks, key=torch.numel))
    sends, sent_bytes = [], 0
    for step in range(1, n):
        outgoing, target = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = arriving[: target.numel()]
        receive = wire.irecv(incoming, (rank - 1) % n, tag)
        sends.append(wire.isend(outgoing, (rank + 1) % n, tag))
        receive.wait()
        reduce(target, incoming)
        sent_bytes += outgoing.nbytes
    for send in sends:
        send.wait()
    return sent_bytes


def ring_all_gather(wire: Wire, chunks: Chunks, tag: int) -> int:
    """Before: chunk r is filled on rank r. After: all chunks are filled on all ranks.

    n - 1 steps: pass on the chunk that just arrived. Cost: (n-1) alpha + (n-1)/n S beta.
    """
    n, rank = wire.size, wire.rank
    sends, sent_bytes = [], 0
    for step in range(n - 1):
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        receive = wire.irecv(incoming, (rank - 1) % n, tag)
        sends.append(wire.isend(outgoing, (rank + 1) % n, tag))
        receive.wait()
        sent_bytes += outgoing.nbytes
    for send in sends:
        send.wait()
    return sent_bytes


def tree_broadcast(wire: Wire, x: torch.Tensor, root: int, tag: int) -> int:
    """Binomial tree: in each round, all who have `x` send it to one who has not.

    Cost: log2(n) (alpha + S beta).
    """
    n, position = wire.size, (wire.rank - root) % wire.size
    sent_bytes, reach = 0, 1
    while reach < n:
        if position < reach and position + reach < n:
            wire.isend(x, (wire.rank + reach) % n, tag).wait()
            sent_bytes += x.nbytes
        elif reach <= position < 2 * reach:
            wire.irecv(x, (wire.rank - reach) % n, tag).wait()
        reach *= 2
    return sent_bytes


def tree_reduce(wire: Wire, x: torch.Tensor, root: int, reduce: Reduction, tag: int) -> int:
    """The broadcast tree backwards: leaves send first, `x` on the root ends as the reduction.
    On the other ranks `x` holds partial sums. Cost: log2(n) (alpha + S beta)."""
    n, position = wire.size, (wire.rank - root) % wire.size
    arriving = torch.empty_like(x)
    reach = 1 << (n - 1).bit_length()
    while (reach := reach // 2) > 0:
        if position < reach and position + reach < n:
            wire.irecv(arriving, (wire.rank + reach) % n, tag).wait()
            reduce(x, arriving)
        elif reach <= position < 2 * reach:
            wire.isend(x, (wire.rank - reach) % n, tag).wait()
            return x.nbytes
    return 0


def flat_gather(wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int) -> int:
    """Everyone sends `x` straight to the root. Cost: (n-1) alpha + (n-1)/n S beta at the root."""
    if wire.rank != root:
        wire.isend(x, root, tag).wait()
        return x.nbytes
    assert chunks is not None
    receives = [wire.irecv(chunks[r], r, tag) for r in range(wire.size) if r != root]
    chunks[root].copy_(x)
    for receive in receives:
        receive.wait()
    return 0


def flat_scatter(wire: Wire, x: torch.Tensor, chunks: Chunks | None, root: int, tag: int) -> int:
    """The root sends chunk r straight to rank r. Cost: (n-1) alpha + (n-1)/n S beta."""
    if wire.rank != root:
        wire.irecv(x, root, tag).wait()
        return 0
    assert chunks is not None
    sends = [wire.isend(chunks[r], r, tag) for r in range(wire.size) if r != root]
    x.copy_(chunks[root])
    for send in sends:
        send.wait()
    return sum(chunks[r].nbytes for r in range(wire.size) if r != root)


def pairwise_all_to_all(wire: Wire, outs: Chunks, ins: Chunks, tag: int) -> int:
    """ins[j] of rank i becomes outs[i] of rank j: in step k everyone sends k ranks ahead.

    Cost: (n-1) alpha + (n-1)/n S beta, S being what one rank holds.
    """
    n, rank = wire.size, wire.rank
    outs[rank].copy_(ins[rank])
    sent_bytes = 0
    for step in range(1, n):
        ahead, behind = (rank + step) % n, (rank - step) % n
        receive = wire.irecv(outs[behind], behind, tag)
        wire.isend(ins[ahead], ahead, tag).wait()
        receive.wait()
        sent_bytes += ins[ahead].nbytes
    return sent_bytes


def dissemination_barrier(wire: Wire, tag: int) -> int:
    """Round k: tell the rank 2^k ahead, hear from the rank 2^k behind; after log2(n) rounds
    everyone has heard, through others, from everyone. Cost: log2(n) alpha."""
    note, heard = torch.zeros(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
    sent_bytes, distance = 0, 1
    while distance < wire.size:
        receive = wire.irecv(heard, (wire.rank - distance) % wire.size, tag)
        wire.isend(note, (wire.rank + distance) % wire.size, tag).wait()
        receive.wait()
        sent_bytes += note.nbytes
        distance *= 2
    return sent_bytes
