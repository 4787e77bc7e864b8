"""Where the ranks of a layout stand on the nodes of a cluster.

    Mesh(pp, dp, tp), tensor innermost; nodes of 8

        tp 8    a group is a node                    all-reduces stay inside
        dp      ranks tp apart                       leave it, over all its ports
        pp      a stage is dp x tp ranks further on  messages leave it, unless a replica fits twice

Groups that stand on nodes in the same way take the same time: one of each way is enough.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from labkit.comm.mesh import rank_at
from labkit.replaying.planning.layout import Layout

Ranks = tuple[int, ...]


def mesh_sizes(layout: Layout) -> dict[str, int]:
    """The mesh of a layout, as Mesh(**sizes) takes it."""
    return {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}


def tensor_groups(layout: Layout, stage: int, per_node: int) -> tuple[Ranks, ...]:
    """Ranks that share the layers of a stage: of each way to stand on nodes, one group."""
    return _groups((layout.tp, layout.pp, layout.dp), "tp", stage, per_node)


def data_groups(layout: Layout, stage: int, per_node: int) -> tuple[Ranks, ...]:
    """Ranks that have the same part of a stage, likewise."""
    return _groups((layout.tp, layout.pp, layout.dp), "dp", stage, per_node)


def ends_groups(layout: Layout, per_node: int) -> tuple[Ranks, ...]:
    """Ranks of the first and of the last stage that share rows of a tied embedding."""
    return boundary(layout, 0, per_node, layout.pp - 1)


def boundary(
    layout: Layout, stage: int, per_node: int, other: int | None = None
) -> tuple[Ranks, ...]:
    """(sender, receiver) between a stage and the next one (or another), likewise."""
    other = (stage + 1) % layout.pp if other is None else other
    return _pairs((layout.tp, layout.pp, layout.dp), stage, other, per_node)


@lru_cache(maxsize=65536)
def moved(groups: tuple[Ranks, ...], per_node: int) -> tuple[Ranks, ...]:
    """The same groups from the first node on, where those of other stages stand as well: what takes
    as long has one name."""
    return tuple(
        tuple(rank - min(ranks) // per_node * per_node for rank in ranks) for ranks in groups
    )


@lru_cache(maxsize=65536)
def _groups(sizes: tuple[int, int, int], axis: str, stage: int, per_node: int) -> tuple[Ranks, ...]:
    tp, pp, dp = sizes
    mesh = {"pp": pp, "dp": dp, "tp": tp}
    across = "dp" if axis == "tp" else "tp"
    found = []
    for index in range(min(mesh[across], per_node)):  # then they stand as before
        where = {"pp": stage, across: index}
        found.append(tuple(rank_at(mesh, where | {axis: k}) for k in range(mesh[axis])))
    return _one_of_each(found, per_node)


@lru_cache(maxsize=65536)
def _pairs(sizes: tuple[int, int, int], stage: int, other: int, per_node: int) -> tuple[Ranks, ...]:
    tp, pp, dp = sizes
    mesh = {"pp": pp, "dp": dp, "tp": tp}
    inside = [(d, t) for d in range(min(dp, per_node)) for t in range(min(tp, per_node))]
    found = [
        tuple(rank_at(mesh, {"pp": one, "dp": d, "tp": t}) for one in (stage, other))
        for d, t in inside
    ]
    return _one_of_each(found, per_node)


def _one_of_each(groups: Iterable[Ranks], per_node: int) -> tuple[Ranks, ...]:
    kinds: dict[tuple[int, ...], Ranks] = {}
    for ranks in groups:
        nodes = Counter(rank // per_node for rank in ranks)
        kinds.setdefault(tuple(sorted(nodes.values())), ranks)
    return tuple(kinds.values())
