"""The cost of each algorithm in the alpha-beta-gamma model, in pure Python.

    seconds = steps x alpha + sent_bytes x beta + reduced_bytes x gamma

    alpha    latency of a message, in seconds             n    ranks
    beta     seconds per byte on a link                   S    bytes (all chunks together)
    gamma    seconds to reduce a byte                     P    pieces of at most PIECE_BYTES

`steps` counts consecutive messages; `sent_bytes` is the larger of the bytes into and out of the
busiest rank. Each algorithm's file cites its source.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil

PIECE_BYTES = 1 << 21  # longer tensors are split, so that sends and reductions overlap


@dataclass(frozen=True)
class Cost:
    """Cost on the slowest rank: consecutive messages, bytes sent, bytes reduced."""

    steps: float
    sent_bytes: float
    reduced_bytes: float = 0.0

    def seconds(
        self, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0
    ) -> float:
        return (
            self.steps * alpha_s
            + self.sent_bytes * beta_s_per_byte
            + self.reduced_bytes * gamma_s_per_byte
        )

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.steps + other.steps,
            self.sent_bytes + other.sent_bytes,
            self.reduced_bytes + other.reduced_bytes,
        )


def piece_count(nbytes: float) -> int:
    """The number of pieces into which a tensor of `nbytes` is split."""
    return max(1, ceil(nbytes / PIECE_BYTES))


def rounds(n: int) -> int:
    """ceil(log2 n), the number of doubling rounds needed to reach n ranks."""
    return (n - 1).bit_length()


def power_of_two(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def double_tree(n: int) -> list[list[int | None]]:
    """Each rank's parent (root: None) in two trees. In the first, odd ranks are leaves; a parent
    has the rank's lowest set bit moved up by one, or cleared if that exceeds n - 1. The second
    mirrors (n even) or shifts (n odd) the first: even ranks, except 0 if n is odd, are leaves."""

    def parent(rank: int) -> int | None:
        lowest = rank & -rank
        above = rank ^ lowest | lowest << 1
        return None if rank == 0 else above if above < n else rank ^ lowest

    first = [parent(rank) for rank in range(n)]
    place = [n - 1 - rank if n % 2 == 0 else (rank - 1) % n for rank in range(n)]
    above = [first[place[rank]] for rank in range(n)]
    return [first, [None if rank is None else place.index(rank) for rank in above]]


def depth(parents: list[int | None], rank: int) -> int:
    """Number of steps from `rank` up to the root."""
    above = parents[rank]
    return 0 if above is None else 1 + depth(parents, above)


def _chain(n: int, S: float) -> Cost:
    P = piece_count(S)
    return Cost(P + n - 2, (P + n - 2) / P * S)


def _rings(n: int, S: float) -> Cost:
    return Cost((n - 1) * piece_count(S / n), (n - 1) / n * S)


def _halving(n: int, S: float) -> Cost:
    core = power_of_two(n)
    held = [2] * (n - core) + [1] * (2 * core - n)  # final chunks per core rank
    kept = [sum(held[: core >> k]) for k in range(1, rounds(core) + 1)]  # on the busiest rank
    cost = Cost(rounds(core), sum(kept) / n * S, sum(kept) / n * S)
    return cost + Cost(2, S + S / n, S) if core < n else cost


def _recursive_doubling(n: int, S: float) -> Cost:
    steps = rounds(power_of_two(n))
    cost = Cost(steps, steps * S, steps * S)
    return cost + _fold(S) if power_of_two(n) < n else cost


def _halving_doubling(n: int, S: float) -> Cost:
    core = power_of_two(n)
    part = (core - 1) / core * S
    cost = Cost(2 * rounds(core), 2 * part, part)
    return cost + _fold(S) if core < n else cost


def _fold(S: float) -> Cost:
    return Cost(2, 2 * S, S)


def _double_tree(n: int, S: float) -> Cost:
    P = piece_count(S / 2)
    height, children, full = _double_tree_pieces(n, 0)
    few = min(P, 2 * height + 1)  # with more pieces, all links are in use in some ticks
    pieces = _double_tree_pieces(n, few)[2] + (P - few) * full
    return Cost(P + 2 * height - 1, pieces * S / (2 * P), children * S / 2)


@cache
def _double_tree_pieces(n: int, P: int) -> tuple[int, int, int]:
    """Returns the height of a tree, the maximum number of children, and the pieces through the
    busiest rank of each tick, summed over ticks (P = 0: of one tick with all links in use)."""
    trees = double_tree(n)
    children = [Counter(tree) for tree in trees]
    depths = [[depth(tree, rank) for rank in range(n)] for tree in trees]
    height = max(depths[0])
    places = {  # per tree: depth, children, parents; many ranks share a place
        tuple((d[r], c[r], int(tree[r] is not None)) for tree, c, d in zip(trees, children, depths))
        for r in range(n)
    }

    def passing(place: tuple[tuple[int, int, int], ...], tick: int) -> int:
        sent = received = 0
        for depth_here, below, above in place:
            rising, falling = tick - height + depth_here, tick - height - depth_here
            for k, out, into in ((rising, above, below), (falling, below, above)):
                sent += (not P or 0 <= k < P) * out
                received += (not P or 0 <= k + 1 < P) * into  # for use in the next tick
        return max(sent, received)

    ticks = range(P + 2 * height) if P else range(1)
    pieces = sum(max(passing(place, tick) for place in places) for tick in ticks)
    return height, max(children[0][rank] for rank in range(n)), pieces


COSTS: dict[str, dict[str, Callable[[int, float], Cost]]] = {
    "broadcast": {
        "flat": lambda n, S: Cost(n - 1, (n - 1) * S),
        "tree": lambda n, S: Cost(rounds(n), rounds(n) * S),
        "chain": _chain,
    },
    "reduce": {
        "flat": lambda n, S: Cost(n - 1, (n - 1) * S, (n - 1) * S),
        "tree": lambda n, S: Cost(rounds(n), rounds(n) * S, rounds(n) * S),
        "chain": lambda n, S: _chain(n, S) + Cost(0, 0, _chain(n, S).sent_bytes),
    },
    "gather": {
        "flat": lambda n, S: Cost(n - 1, (n - 1) / n * S),
        "tree": lambda n, S: Cost(rounds(n), (n - 1) / n * S),
    },
    "scatter": {
        "flat": lambda n, S: Cost(n - 1, (n - 1) / n * S),
        "tree": lambda n, S: Cost(rounds(n), (n - 1) / n * S),
    },
    "all_gather": {
        "ring": _rings,
        "recursive_doubling": lambda n, S: Cost(rounds(n), (n - 1) / n * S),
        "bruck": lambda n, S: Cost(rounds(n), (n - 1) / n * S),
    },
    "reduce_scatter": {
        "ring": lambda n, S: _rings(n, S) + Cost(0, 0, (n - 1) / n * S),
        "recursive_halving": _halving,
    },
    "all_reduce": {
        "naive": lambda n, S: Cost(2 * (n - 1), 2 * (n - 1) * S, (n - 1) * S),
        "tree": lambda n, S: Cost(2 * rounds(n), 2 * rounds(n) * S, rounds(n) * S),
        "ring": lambda n, S: _rings(n, S) + _rings(n, S) + Cost(0, 0, (n - 1) / n * S),
        "recursive_doubling": _recursive_doubling,
        "halving_doubling": _halving_doubling,
        "double_tree": _double_tree,
    },
    "all_to_all": {"pairwise": lambda n, S: Cost(n - 1, (n - 1) / n * S)},
    "barrier": {"dissemination": lambda n, S: Cost(rounds(n), 0)},
    "ring_exchange": {"next": lambda n, S: Cost(1, S)},
}


def cost(collective: str, algorithm: str, n: int, nbytes: float) -> Cost:
    """Cost of one operation on n ranks; `nbytes` is S, the bytes of all n chunks together."""
    return Cost(0, 0) if n == 1 else COSTS[collective][algorithm](n, nbytes)


def hierarchical_cost(nodes: int, ranks_per_node: int, nbytes: float) -> tuple[Cost, Cost]:
    """The costs of a hierarchical all-reduce: one inside nodes, and one between nodes."""
    k = ranks_per_node
    ring = Cost(2 * (k - 1), 2 * (k - 1) / k * nbytes, (k - 1) / k * nbytes)
    return ring, cost("all_reduce", "ring", nodes, nbytes / k)
