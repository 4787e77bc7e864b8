"""Where the ranks of a layout sit on the nodes of a cluster, and what a collective takes there.

    Mesh(pp, dp, tp), tensor parallelism innermost; nodes of 8

        tp 8    a group is a node                     all-reduces stay inside
        dp      ranks tp apart                        leave the node, over all its ports
        pp      the next stage is dp x tp ranks on    messages leave it, unless a replica fits twice

Groups that are spread over nodes in the same way take the same time: one of each way is enough.
"""

from collections import Counter
from functools import lru_cache
from itertools import product

from labkit.comm.mesh import rank_at
from labkit.replaying.costs import Costs, Sending
from labkit.replaying.planning.layout import Layout

Ranks = tuple[int, ...]
Groups = tuple[Ranks, ...]


def mesh_sizes(layout: Layout) -> dict[str, int]:
    """The mesh of a layout, as Mesh(**sizes) takes it."""
    return {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}


def tensor_groups(layout: Layout, stage: int, per_node: int) -> Groups:
    """Ranks that share the layers of a stage: one group of each way to sit on nodes."""
    return _groups(layout.pp, layout.dp, layout.tp, "tp", (stage,), per_node)


def data_groups(layout: Layout, stage: int, per_node: int) -> Groups:
    """Ranks with the same shard of a stage, likewise."""
    return _groups(layout.pp, layout.dp, layout.tp, "dp", (stage,), per_node)


def boundary(layout: Layout, stage: int, per_node: int) -> Groups:
    """(sender, receiver) between a stage and the next one, likewise."""
    ends = stage, (stage + 1) % layout.pp
    return _groups(layout.pp, layout.dp, layout.tp, "pp", ends, per_node)


def tied_groups(layout: Layout, per_node: int) -> Groups:
    """Ranks of the first and the last stage that share rows of a tied embedding, likewise."""
    ends = 0, layout.pp - 1
    return _groups(layout.pp, layout.dp, layout.tp, "pp", ends, per_node)


@lru_cache(maxsize=65536)
def _groups(pp: int, dp: int, tp: int, axis: str, stages: tuple[int, ...], per_node: int) -> Groups:
    """The groups along `axis`; those along "pp" have one rank of each of the `stages`."""
    mesh = {"pp": pp, "dp": dp, "tp": tp}
    members = stages if axis == "pp" else range(mesh[axis])
    others = [other for other in ("dp", "tp") if other != axis]
    kinds: dict[Ranks, Ranks] = {}
    # After as many indices as a node has ranks, placements repeat.
    for indices in product(*(range(min(mesh[other], per_node)) for other in others)):
        fixed = {"pp": stages[0], **dict(zip(others, indices, strict=True))}
        ranks = tuple(rank_at(mesh, fixed | {axis: member}) for member in members)
        on_node = Counter(rank // per_node for rank in ranks)
        kinds.setdefault(tuple(sorted(on_node.values())), ranks)
    return tuple(kinds.values())


@lru_cache(maxsize=65536)
def moved(groups: Groups, per_node: int) -> Groups:
    """The same groups counted from the first node: stages whose groups sit alike then share what
    was computed for one of them."""
    return tuple(
        tuple(rank - min(ranks) // per_node * per_node for rank in ranks) for ranks in groups
    )


def slowest(op: str, nbytes: int, costs: Costs, groups: Groups) -> Sending:
    """A collective, on that of the groups where it takes longest."""
    return max((costs.collective(op, nbytes, ranks) for ranks in groups), key=lambda x: x.total_s)
