"""A mesh: the ranks arranged in a grid of named axes, with a `Comm` along one or more axes.

    Mesh(pp=2, dp=2, tp=2), 8 ranks: the last axis varies fastest

                 tp 0   tp 1                       tp 0   tp 1
        dp 0   [  0      1  ]             dp 0   [  4      5  ]
        dp 1   [  2      3  ]             dp 1   [  6      7  ]
                    pp 0                              pp 1

    rank 5 is at pp 1, dp 0, tp 1: its mesh.tp has ranks (4, 5), mesh.dp (5, 7), mesh.pp (1, 5);
    mesh["pp", "dp"], along both axes, has all ranks at tp 1: (1, 3, 5, 7)

Along the last axis, ranks are consecutive, often on one node: use this axis for the most traffic
(Narayanan et al., arXiv 2104.04473, section 3.2, takeaway 1: tensor parallelism inside a node).
"""

from collections.abc import Collection, Iterator, Mapping
from math import prod

from labkit.comm.communicator import Comm
from labkit.events import ranks_in_words


class Mesh:
    """The ranks of `comm` (default: all ranks) along named axes, outermost first.

        sizes     axis -> number of ranks along it
        <axis>    this rank's `Comm` along that axis: mesh.dp, or mesh["dp"]

    All ranks must create the mesh, and request the same multi-axis groups, such as
    mesh["dp", "cp"], in the same order. Groups list ranks in mesh order; equal meshes share groups.
    Raises ValueError unless the axes cover all ranks, KeyError for an unknown axis.

    >>> model = DDP(context_parallel(model, mesh.cp), mesh["dp", "cp"])
    """

    def __init__(self, comm: Comm | None = None, /, **sizes: int):
        self.comm = Comm.of(comm)
        self.sizes = dict(sizes)
        check_sizes(self.sizes, self.comm.size)
        self._comms = {axis: self._over([axis]) for axis in self.sizes}
        self._joint: dict[tuple[str, ...], Comm] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> Comm:
        asked = (axes,) if isinstance(axes, str) else axes
        for axis in asked:
            if axis not in self._comms:
                raise KeyError(f"this mesh has no axis {axis!r}; it has {', '.join(self._comms)}")
        if not asked or len(set(asked)) < len(asked):
            raise KeyError(f"{list(asked)}: pass one or more distinct axes")
        several = tuple(axis for axis in self.sizes if axis in asked and self.sizes[axis] > 1)
        if len(several) < 2:  # the other axes have size 1
            return self._comms[several[0] if several else asked[0]]
        if several not in self._joint:
            self._joint[several] = self._over(several)
        return self._joint[several]

    def __getattr__(self, axis: str) -> Comm:
        if axis.startswith("_") or axis not in self._comms:
            have = ", ".join(self.__dict__.get("_comms", ()))
            raise AttributeError(f"this mesh has no axis {axis!r}; it has {have}")
        return self._comms[axis]

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"Mesh({axes}; this is rank {self.comm.rank} at {self.coordinates()})"

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """The coordinates of `rank` (default: this rank): axis -> index."""
        return coordinates(self.sizes, self.comm.rank if rank is None else rank)

    def rank_at(self, **where: int) -> int:
        """The rank at these indices; omitted axes default to this rank's index."""
        return rank_at(self.sizes, self.coordinates() | where)

    def _over(self, axes: Collection[str]) -> Comm:
        """Create one group per line along `axes`, in the same order on all ranks."""
        if prod(self.sizes[axis] for axis in axes) == self.comm.size:
            return self.comm
        all_lines = list(lines(self.sizes, *axes))
        groups = [self.comm.subgroup(line, shared=True) for line in all_lines]
        own = next(group for group in groups if group is not None)
        own.parallel = self.comm, all_lines
        return own


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Index of `rank` on each axis. Raises ValueError for a rank outside the mesh."""
    if rank not in range(ranks := prod(sizes.values())):
        mesh = f"a mesh of {ranks_in_words(ranks)}"
        raise ValueError(f"rank {rank} is not in {mesh}; choose 0 to {ranks - 1}")
    where = {}
    for axis in reversed(list(sizes)):
        rank, where[axis] = divmod(rank, sizes[axis])
    return {axis: where[axis] for axis in sizes}


def rank_at(sizes: Mapping[str, int], where: Mapping[str, int]) -> int:
    """The rank at these indices. Raises ValueError for an unknown axis or an index out of range."""
    rank = 0
    for axis in where:
        if axis not in sizes:
            raise ValueError(f"no axis {axis!r} in this mesh; it has {', '.join(sizes)}")
    for axis, size in sizes.items():
        if where[axis] not in range(size):
            raise ValueError(f"{axis}={where[axis]}: choose 0 to {size - 1}")
        rank = rank * size + where[axis]
    return rank


def lines(sizes: Mapping[str, int], *axes: str) -> Iterator[list[int]]:
    """Sets of ranks that differ only on `axes`: lines for one axis, planes for several axes."""
    others = [name for name in sizes if name not in axes]
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(sizes.values())):
        where = coordinates(sizes, rank)
        members.setdefault(tuple(where[name] for name in others), []).append(rank)
    yield from members.values()


def check_sizes(sizes: Mapping[str, int], ranks: int) -> None:
    """Raises ValueError, suggesting sizes, unless the axes cover `ranks` ranks."""
    reserved = [name for name in sizes if name.startswith("_") or hasattr(Mesh, name)]
    if not sizes or reserved or "comm" in sizes or "sizes" in sizes:
        raise ValueError(f"a mesh needs named axes, as in Mesh(dp=2, tp=2), not {dict(sizes)}")
    for axis, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"{axis}={size!r}: choose a whole number, 1 or more, for the size of an axis"
            )
    if prod(sizes.values()) != ranks:
        axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        requested = list(sizes.values())
        closest = sorted(
            factorizations(ranks, len(sizes)),
            key=lambda factors: sum(abs(a - b) for a, b in zip(factors, requested)),
        )
        fit = " or ".join(
            "(" + ", ".join(f"{axis}={size}" for axis, size in zip(sizes, factors)) + ")"
            for factors in closest[:3]
        )
        needs = f"Mesh({axes}) needs {ranks_in_words(prod(sizes.values()))}, but there are {ranks}"
        raise ValueError(f"{needs}; choose {fit}")


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as an ordered product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in factorizations(number // first, parts - 1):
                yield (first, *rest)
