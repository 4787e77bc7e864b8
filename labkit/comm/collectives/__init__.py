"""The collectives, written from send and receive; one file for each, with its algorithms, their
pictures and their costs.

    steps.py       what they are made of: generators that wait, run alone or in turns
    registry.py    all of them by name
    costs.py       steps, bytes and reductions of each, in the alpha-beta-gamma model
    sent.py        the exact bytes that each rank sends

Shapes: n ranks, S bytes; `chunks` is a list of n flat tensors, chunk i belonging to rank i.
Cost: alpha = latency of a message, beta = seconds per byte, gamma = seconds to reduce a byte.
Which one runs: labkit/runtime/transports/chooser.py.
"""

from labkit.comm.collectives.all_gather import (
    bruck_all_gather,
    recursive_doubling_all_gather,
    ring_all_gather,
    rings_all_gather,
)
from labkit.comm.collectives.all_reduce import (
    halving_doubling_all_reduce,
    naive_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_reduce,
    rings_all_reduce,
    tree_all_reduce,
)
from labkit.comm.collectives.all_to_all import pairwise_all_to_all
from labkit.comm.collectives.barrier import dissemination_barrier
from labkit.comm.collectives.broadcast import chain_broadcast, flat_broadcast, tree_broadcast
from labkit.comm.collectives.costs import Cost, cost, hierarchical_cost
from labkit.comm.collectives.double_tree import double_tree_all_reduce
from labkit.comm.collectives.gather import flat_gather, tree_gather
from labkit.comm.collectives.hierarchical import hierarchical_all_reduce
from labkit.comm.collectives.reduce import chain_reduce, flat_reduce, tree_reduce
from labkit.comm.collectives.reduce_scatter import (
    recursive_halving_reduce_scatter,
    ring_reduce_scatter,
)
from labkit.comm.collectives.registry import ALGORITHMS, EQUAL_SIZES_ONLY, POWERS_OF_TWO_ONLY
from labkit.comm.collectives.ring_exchange import next_ring_exchange
from labkit.comm.collectives.scatter import flat_scatter, tree_scatter
from labkit.comm.collectives.sent import Call, sent_bytes
from labkit.comm.collectives.steps import Algorithm, Chunks, Reduction, in_turns, run

__all__ = [
    "ALGORITHMS",
    "EQUAL_SIZES_ONLY",
    "POWERS_OF_TWO_ONLY",
    "Algorithm",
    "Call",
    "Chunks",
    "Cost",
    "Reduction",
    "bruck_all_gather",
    "chain_broadcast",
    "chain_reduce",
    "cost",
    "dissemination_barrier",
    "double_tree_all_reduce",
    "flat_broadcast",
    "flat_gather",
    "flat_reduce",
    "flat_scatter",
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
    "hierarchical_cost",
    "in_turns",
    "naive_all_reduce",
    "next_ring_exchange",
    "pairwise_all_to_all",
    "recursive_doubling_all_gather",
    "recursive_doubling_all_reduce",
    "recursive_halving_reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "rings_all_gather",
    "rings_all_reduce",
    "run",
    "sent_bytes",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_gather",
    "tree_reduce",
    "tree_scatter",
]
