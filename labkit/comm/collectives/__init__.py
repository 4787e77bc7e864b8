"""Collectives implemented with send and receive: one file per collective, with pictures and costs.

    steps.py       building blocks: generators that yield to wait, and their interleaving
    costs.py       steps, bytes sent and bytes reduced per algorithm, in the alpha-beta-gamma model

Shapes: n ranks, S bytes; `chunks` is a list of n flat tensors; chunk i belongs to rank i.
Cost: alpha = latency of a message, beta = seconds per byte, gamma = seconds to reduce a byte.
labkit/runtime/transports/chooser.py selects the algorithm. Signatures:

    broadcast         (wire, x, root, tag)
    reduce            (wire, x, root, reduce, tag)
    gather, scatter   (wire, x, chunks or None, root, tag)
    all_gather        (wire, chunks, tag)
    reduce_scatter    (wire, chunks, out, reduce, tag)
    all_reduce        (wire, x, reduce, divide_by, tag)
    all_to_all        (wire, outs, ins, tag)
    barrier           (wire, token, tag)
    ring_exchange     (wire, out, x, tag)
"""

from collections.abc import Callable

from labkit.comm.collectives.all_gather import (
    bruck_all_gather,
    recursive_doubling_all_gather,
    rings_all_gather,
)
from labkit.comm.collectives.all_reduce import (
    halving_doubling_all_reduce,
    naive_all_reduce,
    recursive_doubling_all_reduce,
    rings_all_reduce,
    tree_all_reduce,
)
from labkit.comm.collectives.all_to_all import pairwise_all_to_all
from labkit.comm.collectives.barrier import dissemination_barrier
from labkit.comm.collectives.broadcast import chain_broadcast, flat_broadcast, tree_broadcast
from labkit.comm.collectives.double_tree import double_tree_all_reduce
from labkit.comm.collectives.gather import flat_gather, tree_gather
from labkit.comm.collectives.hierarchical import hierarchical_all_reduce
from labkit.comm.collectives.reduce import chain_reduce, flat_reduce, tree_reduce
from labkit.comm.collectives.reduce_scatter import (
    recursive_halving_reduce_scatter,
    rings_reduce_scatter,
)
from labkit.comm.collectives.ring_exchange import next_ring_exchange
from labkit.comm.collectives.scatter import flat_scatter, tree_scatter
from labkit.comm.collectives.steps import Algorithm

ALGORITHMS: dict[str, dict[str, Callable[..., Algorithm]]] = {
    "broadcast": {"flat": flat_broadcast, "tree": tree_broadcast, "chain": chain_broadcast},
    "reduce": {"flat": flat_reduce, "tree": tree_reduce, "chain": chain_reduce},
    "gather": {"flat": flat_gather, "tree": tree_gather},
    "scatter": {"flat": flat_scatter, "tree": tree_scatter},
    "all_gather": {
        "ring": rings_all_gather,
        "recursive_doubling": recursive_doubling_all_gather,
        "bruck": bruck_all_gather,
    },
    "reduce_scatter": {
        "ring": rings_reduce_scatter,
        "recursive_halving": recursive_halving_reduce_scatter,
    },
    "all_reduce": {
        "naive": naive_all_reduce,
        "tree": tree_all_reduce,
        "ring": rings_all_reduce,
        "recursive_doubling": recursive_doubling_all_reduce,
        "halving_doubling": halving_doubling_all_reduce,
        "double_tree": double_tree_all_reduce,
        "hierarchical": hierarchical_all_reduce,
    },
    "all_to_all": {"pairwise": pairwise_all_to_all},
    "barrier": {"dissemination": dissemination_barrier},
    "ring_exchange": {"next": next_ring_exchange},
}
POWERS_OF_TWO_ONLY = {("all_gather", "recursive_doubling")}
EQUAL_SIZES_ONLY = {("gather", "tree"), ("scatter", "tree")}
