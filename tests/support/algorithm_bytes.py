"""The exact bytes that a rank sends in each algorithm of labkit/comm/collectives: for any `sizes`
(the elements of each rank's chunk, whose sum is the whole tensor) and `position` (the rank counted
from the root)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.comm.collectives.costs import double_tree, power_of_two
from labkit.events import chunk_sizes


@dataclass(frozen=True)
class Call:
    """One operation, as a rank sees it; sizes in elements."""

    sizes: Sequence[int]
    rank: int
    root: int = 0
    nodes: Sequence[Sequence[int]] = ()

    @property
    def n(self) -> int:
        return len(self.sizes)

    @property
    def whole(self) -> int:
        return sum(self.sizes)

    @property
    def position(self) -> int:
        return (self.rank - self.root) % self.n

    @property
    def mine(self) -> int:
        return self.sizes[self.rank]

    @property
    def after(self) -> int:
        return self.sizes[(self.rank + 1) % self.n]


def sent_bytes(collective: str, algorithm: str, itemsize: int, call: Call) -> int:
    """Bytes that `call.rank` sends; a barrier sends one byte in each round, whatever the sizes."""
    return itemsize * SENT[collective][algorithm](call)


def below(call: Call) -> int:
    """To how many a rank sends in the binomial tree of the broadcast."""
    reaches = [1 << k for k in range((call.n - 1).bit_length())]
    return sum(call.position < reach and call.position + reach < call.n for reach in reaches)


def subtree(call: Call) -> int:
    """How many ranks are in the tree of gather and scatter below this one, itself included."""
    lowest = call.position & -call.position or call.n
    return min(lowest, call.n - call.position)


def bruck(call: Call) -> int:
    """All chunks held, from the rank's own on, again and again; at the end, what is missing."""
    sent, have = 0, 1
    while have < call.n:
        more = min(have, call.n - have)
        sent += sum(call.sizes[(call.rank + k) % call.n] for k in range(more))
        have += more
    return sent


def doubled(sizes: Sequence[int], rank: int) -> int:
    """The 1, 2, 4, ... chunks between multiples of 1, 2, 4, ... that contain this rank."""
    sent, reach = 0, 1
    while reach < len(sizes):
        first = rank // reach * reach
        sent += sum(sizes[first : first + reach])
        reach *= 2
    return sent


def halved(call: Call) -> int:
    """Every block but its own; at the end a folded rank gets its chunk."""
    core = power_of_two(call.n)
    if call.rank >= core:
        return call.whole
    return call.whole - call.mine


def recursively_doubled(call: Call) -> int:
    """The whole in every round, and once more to or for a rank that was folded in."""
    core = power_of_two(call.n)
    if call.rank >= core:
        return call.whole
    return call.whole * (core.bit_length() - 1 + (call.rank + core < call.n))


def halved_and_doubled(call: Call) -> int:
    """All chunks but one's own on the way in, what has been doubled on the way out."""
    core = power_of_two(call.n)
    if call.rank >= core:
        return call.whole
    sizes = chunk_sizes(call.whole, core)
    kept = call.whole - sizes[call.rank] + doubled(sizes, call.rank)
    return kept + call.whole * (call.rank + core < call.n)


def double_treed(call: Call) -> int:
    """In each tree, its half once up and once down to each child."""
    sent = 0
    for half, parents in zip(chunk_sizes(call.whole, 2), double_tree(call.n)):
        sent += half * ((parents[call.rank] is not None) + parents.count(call.rank))
    return sent


def hierarchical(call: Call) -> int:
    """A ring inside the node, one along the column, and again one inside."""
    node = next(ranks for ranks in call.nodes if call.rank in ranks)
    columns, local = min(map(len, call.nodes)), node.index(call.rank)
    if local >= columns:
        return call.whole
    folded = len(range(local + columns, len(node), columns))
    sizes = chunk_sizes(call.whole, columns)
    inside = ring(Call(sizes, local))
    column = [ranks[local] for ranks in call.nodes]
    between = Call(chunk_sizes(sizes[local], len(column)), column.index(call.rank))
    return inside + ring(between) + folded * call.whole


def ring(call: Call) -> int:
    """An all-reduce: all chunks but one on the way in, all chunks but one on the way out."""
    return 2 * call.whole - call.mine - call.after


SENT: dict[str, dict[str, Callable[[Call], int]]] = {
    "broadcast": {
        "flat": lambda call: call.whole * (call.n - 1) * (call.position == 0),
        "tree": lambda call: call.whole * below(call),
        "chain": lambda call: call.whole * (call.position < call.n - 1),
    },
    "reduce": dict.fromkeys(
        ("flat", "tree", "chain"), lambda call: call.whole * (call.position > 0)
    ),
    "gather": {
        "flat": lambda call: call.mine * (call.position > 0),
        "tree": lambda call: call.mine * subtree(call) * (call.position > 0),
    },
    "scatter": {
        "flat": lambda call: (call.whole - call.mine) * (call.position == 0),
        "tree": lambda call: call.mine * (subtree(call) - 1),
    },
    "all_gather": {
        "ring": lambda call: call.whole - call.after,
        "bruck": bruck,
        "recursive_doubling": lambda call: doubled(call.sizes, call.rank),
    },
    "reduce_scatter": {"ring": lambda call: call.whole - call.mine, "recursive_halving": halved},
    "all_reduce": {
        "naive": lambda call: call.whole * (call.n - 1 if call.rank == 0 else 1),
        "tree": lambda call: call.whole * ((call.rank > 0) + below(call)),
        "ring": ring,
        "gloo": ring,
        "recursive_doubling": recursively_doubled,
        "halving_doubling": halved_and_doubled,
        "double_tree": double_treed,
        "hierarchical": hierarchical,
    },
    "all_to_all": {"pairwise": lambda call: call.whole - call.mine},
    "barrier": {"dissemination": lambda call: (call.n - 1).bit_length()},
    "ring_exchange": {"next": lambda call: call.whole * (call.n > 1)},
}
