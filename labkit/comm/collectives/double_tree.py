"""All-reduce over two trees at once: as few steps as one tree, with every rank's link busy.

In a single binary tree, the leaves (half of the ranks) send only their own `x`. With two trees,
each rank is an inner node of one and a leaf of the other (if n is odd, rank 0 is inner in both).
Each tree carries half of `x`, whose P pieces are pipelined up to the root and down again. 4 ranks:

    0                        3
    └── 2                    └── 1       each rank has at most a parent and two children
        ├── 1                    ├── 2   in one tree, and only a parent in the other
        └── 3                    └── 0

Cost: (P + 2h - 1) alpha + 2 S beta + S gamma for many pieces, with height h of about log2 n: the
ring's 2 S beta at a latency of O(log n). Some links are idle while the first pieces rise and
the last pieces fall; costs.py counts the bytes through the busiest rank.

Source: Sanders, Speck and Träff, "Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and
Scan", 2009; the trees are NCCL's (src/graph/trees.cc).
"""

from collections.abc import Iterator

import torch

from labkit.comm.collectives.costs import depth, double_tree
from labkit.comm.collectives.steps import STREAM, Algorithm, Reduction, pieces_of
from labkit.runtime.transports.wire import Wire, Work


def double_tree_all_reduce(
    wire: Wire, x: torch.Tensor, reduce: Reduction, divide_by: int, tag: int
) -> Algorithm:
    """A rank at depth d sends piece k up in tick k + h - d and down in tick k + h + d. Every wait
    is for a message of an earlier tick, so no cycle of waiting ranks can form."""
    halves = zip(x.tensor_split(2), double_tree(wire.size))
    trees = [Tree(wire, half, up, tag + k * 2 * STREAM) for k, (half, up) in enumerate(halves)]
    for tick in range(max(len(tree.pieces) + 2 * tree.height for tree in trees)):
        for tree in trees:
            rising, falling = tick - tree.height + tree.depth, tick - tree.height - tree.depth
            if 0 <= rising < len(tree.pieces):
                yield from tree.up(rising, reduce, divide_by)
            if 0 <= falling < len(tree.pieces):
                yield from tree.down(falling)
    for tree in trees:
        yield from tree.sends
    return sum(tree.sent_bytes for tree in trees)


class Tree:
    """This rank's position in one of the trees, and the half of `x` that this tree carries."""

    def __init__(self, wire: Wire, x: torch.Tensor, parents: list[int | None], tag: int):
        self.wire, self.pieces = wire, pieces_of(x)
        self.up_tag, self.down_tag = tag, tag + STREAM
        self.parent = parents[wire.rank]
        self.children = [rank for rank in range(wire.size) if parents[rank] == wire.rank]
        self.depth = depth(parents, wire.rank)
        self.height = max(depth(parents, rank) for rank in range(wire.size))
        # All receives are posted at once, and all sends are awaited at the end. The parent's pieces
        # are received into `x` itself: a piece comes down only after this rank has sent it up.
        self.incoming = [pieces_of(torch.empty_like(x)) for _ in self.children]
        self.rising = [
            [wire.irecv(piece, child, self.up_tag) for piece in pieces]
            for child, pieces in zip(self.children, self.incoming)
        ]
        self.falling = [
            wire.irecv(piece, self.parent, self.down_tag)
            for piece in self.pieces
            if self.parent is not None
        ]
        self.sends: list[Work] = []
        self.sent_bytes = 0

    def up(self, k: int, reduce: Reduction, divide_by: int) -> Iterator[Work]:
        """Add the children's piece k to this rank's piece k and send the sum to the parent."""
        for receives, incoming in zip(self.rising, self.incoming):
            yield receives[k]
            reduce(self.pieces[k], incoming[k])
        if self.parent is not None:
            self._send(self.pieces[k], self.parent, self.up_tag)
        elif divide_by != 1:
            self.pieces[k].div_(divide_by)

    def down(self, k: int) -> Iterator[Work]:
        """Receive the reduced piece k from the parent and send it to the children."""
        if self.parent is not None:
            yield self.falling[k]
        for child in self.children:
            self._send(self.pieces[k], child, self.down_tag)

    def _send(self, piece: torch.Tensor, peer: int, tag: int) -> None:
        self.sends.append(self.wire.isend(piece, peer, tag))
        self.sent_bytes += piece.nbytes
