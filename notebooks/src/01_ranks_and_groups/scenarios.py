"""The messages of lab 01's open exercise: 12 ranks on 3 nodes of 4, dp=3, pp=2, tp=2.

A step uses only sends and receives, so each message has a source and a destination:

    tp   both ranks of a pair send each other 8,000 bytes
    dp   a ring of 3: each rank sends 3,000 bytes to the next
    pp   the first stage sends 1,000 bytes of activations, the second 1,000 of gradients
"""

from typing import Any

import torch

from labkit.events import CommEvent

SIZES = {"dp": 3, "pp": 2, "tp": 2}
RANKS, RANKS_PER_NODE = 12, 4
TP_BYTES, DP_BYTES, PP_BYTES = 8_000, 3_000, 1_000
BEST = 32_000  # best of 5,775 assignments of 12 ranks to 3 nodes (tests/course/test_lab_01.py)
WORST_ALLOWED = 60_000  # most assignments send far more

Place = tuple[int, ...]  # (dp, pp, tp)


def messages(place: Place) -> list[tuple[Place, int]]:
    """The messages that the rank at this place sends in a step: destination and bytes."""
    dp, pp, tp = place
    return [
        ((dp, pp, 1 - tp), TP_BYTES),
        (((dp + 1) % 3, pp, tp), DP_BYTES),
        ((dp, 1 - pp, tp), PP_BYTES),
    ]


def one_step(comm: Any, places: list[Place]) -> None:
    """On each rank: send and receive the messages of one step."""
    handles = []
    for rank, place in enumerate(places):
        for tag, (target, nbytes) in enumerate(messages(place)):
            if rank == comm.rank:
                x = torch.zeros(nbytes, dtype=torch.uint8)
                handles.append(comm.isend(x, places.index(target), tag=tag))
            elif places.index(target) == comm.rank:
                handles.append(comm.irecv(torch.zeros(nbytes, dtype=torch.uint8), rank, tag=tag))
    for handle in handles:
        handle.wait()


def between_nodes(events: list[list[CommEvent]]) -> int:
    """Total bytes of the messages between nodes."""
    sends = [event for of_rank in events for event in of_rank if event.op == "send"]
    return sum(event.bus_bytes for event in sends if _node(event.rank) != _node(event.peer))


def _node(rank: int | None) -> int:
    assert rank is not None, "a message has a source and a destination"
    return rank // RANKS_PER_NODE
