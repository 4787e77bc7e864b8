"""From one group of ranks to all of its kind: who does the same does it in a group laid out alike.

(0, 1, 2, 3) of 8 ranks    (4, 5, 6, 7)                    neighbours
(0, 4) of 8 ranks          (1, 5)  (2, 6)  (3, 7)          one of each node
"""

from dataclasses import replace
from functools import cache

from labkit.events import CommEvent


@cache
def groups_like(ranks: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """All groups of the shape of `ranks` that together have each of `size` ranks once, as those of
    a mesh do. `ranks` alone where it cannot be laid out so."""
    shape = [rank - min(ranks) for rank in ranks]
    found, free = [], dict.fromkeys(range(size))
    while free:
        first = next(iter(free))
        group = tuple(first + rank for rank in shape)
        if any(rank not in free for rank in group):
            return (ranks,)
        for rank in group:
            del free[rank]
        found.append(group)
    return tuple(found) if ranks in found else (ranks,)


def as_seen_by(event: CommEvent, rank: int, size: int) -> CommEvent:
    """The event of a rank that does the same as the one of `event`: in its own group, and with the
    peer that stands to it as the peer of `event` does to that one. As it is where the group of
    `rank` cannot be known."""
    own = next((x for x in groups_like(event.ranks, size) if rank in x), None)
    if own is None:
        return event
    place, peer, group = own.index(rank), event.peer, event.group
    if event.op in ("send", "recv") and peer is not None:
        peer = (peer + place - event.rank) % len(own)
    if own != event.ranks:
        members = ", ".join(map(str, own[:8])) + (" ..." if len(own) > 8 else "")
        group = f"{group.partition(' (')[0]} (ranks {members})"
    return replace(event, rank=place, ranks=own, peer=peer, group=group)
