"""Meshes: who stands where, who is in whose group, and what wrong sizes are told."""

from itertools import combinations, permutations
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matplotlib.collections import LineCollection

from labkit import Comm, Mesh, World, plot
from labkit.comm.mesh import check_sizes, coordinates, factorizations, lines, rank_at
from labkit.events import ranks_in_words
from tables import raises
from worlds import on_each_rank

SHAPES = [{"dp": 1}, {"dp": 6}, {"pp": 2, "dp": 2, "tp": 2}, {"a": 3, "b": 1, "c": 4, "d": 2}]


@pytest.mark.parametrize("sizes", SHAPES)
def test_coordinates_and_ranks_are_each_others_inverse(sizes: dict[str, int]) -> None:
    size = prod(sizes.values())
    places = [coordinates(sizes, rank) for rank in range(size)]
    assert [rank_at(sizes, place) for place in places] == list(range(size))
    assert places == sorted(places, key=lambda place: list(place.values())), "last varies fastest"
    assert [list(place) for place in places] == [list(sizes)] * size


@pytest.mark.parametrize("sizes", SHAPES)
def test_lines_and_planes_take_every_rank_once(sizes: dict[str, int]) -> None:
    subsets = [axes for count in range(len(sizes)) for axes in permutations(sizes, count + 1)]
    for axes in subsets:
        planes = list(lines(sizes, *axes))
        assert sorted(rank for plane in planes for rank in plane) == list(
            range(prod(sizes.values()))
        )
        for plane in planes:
            assert plane == sorted(plane) and len(plane) == prod(sizes[axis] for axis in axes)
            places = [coordinates(sizes, rank) for rank in plane]
            assert len({tuple(at[x] for x in sizes if x not in axes) for at in places}) == 1
    of_two_axes = list(lines({"a": 2, "b": 3, "c": 2}, "a", "c"))
    assert of_two_axes[1] == [2, 3, 8, 9], "the last axis varies fastest"


@on_each_rank("world4")
def test_a_mesh_that_is_made_again_has_the_groups_of_the_first() -> None:
    """Those of gloo have threads that wake up all the time: cells that run again add none."""
    first, count = Mesh(dp=2, tp=2), dist.get_pg_count()
    again, turned = Mesh(dp=2, tp=2), Mesh(tp=2, dp=2)
    assert again.tp.group is first.tp.group and turned.dp.group is first.tp.group
    anew = Comm().subgroup(first.tp.ranks if Comm().rank < 2 else [0, 1])
    assert anew is None or anew.group is not first.tp.group
    assert dist.get_pg_count() - count == 1


def groups(**sizes: int) -> tuple[dict[str, tuple[int, ...]], dict[str, float], dict[str, int]]:
    mesh = Mesh(**sizes)
    sums = {}
    for axis in sizes:
        x = torch.tensor([float(mesh.comm.rank)])
        mesh[axis].all_reduce(x)
        sums[axis] = x.item()
    assert all(getattr(mesh, axis) is mesh[axis] for axis in sizes)
    assert all(mesh[axis].rank == mesh.coordinates()[axis] for axis in sizes)
    return {axis: mesh[axis].ranks for axis in sizes}, sums, mesh.coordinates()


def test_megatrons_eight_ranks() -> None:
    def joint_groups() -> dict[tuple[str, ...], tuple[int, ...]]:
        mesh, members = Mesh(pp=2, dp=2, tp=2), {}
        for axes in (("pp", "dp"), ("pp", "tp"), ("dp", "tp")):
            comm = mesh[axes]
            assert comm is mesh[axes[::-1]], "in whatever order, one group"
            x = torch.tensor([float(mesh.comm.rank)])
            comm.all_reduce(x)
            assert x.item() == sum(comm.ranks)
            here, (outer, inner) = mesh.coordinates(), axes
            assert comm.rank == 2 * here[outer] + here[inner], "the last axis varies fastest"
            members[axes] = comm.ranks
        assert mesh["tp", "pp", "dp"] is mesh.comm and mesh["dp",] is mesh.dp
        return members

    with World(8) as world:
        alone = world.run(groups, pp=2, dp=2, tp=2)
        joint = world.run(joint_groups)
    ranks, sums, place = alone[5]
    assert ranks == {"pp": (1, 5), "dp": (5, 7), "tp": (4, 5)}
    assert sums == {"pp": 6.0, "dp": 12.0, "tp": 9.0}
    assert place == {"pp": 1, "dp": 0, "tp": 1}
    of_pairs = {("pp", "dp"): (1, 3, 5, 7), ("pp", "tp"): (0, 1, 4, 5), ("dp", "tp"): (4, 5, 6, 7)}
    assert joint[5] == of_pairs
    for groups_of in ([of_rank for of_rank, _, _ in alone], joint):
        for rank, of_rank in enumerate(groups_of):
            for axes, members in of_rank.items():
                assert rank in members and groups_of[members[0]][axes] == members


def test_axes_of_one_rank_and_of_all(world3: World) -> None:
    for rank, (ranks, sums, _) in enumerate(world3.run(groups, dp=3, tp=1)):
        assert ranks == {"dp": (0, 1, 2), "tp": (rank,)}
        assert sums == {"dp": 3.0, "tp": float(rank)}


def test_a_mesh_over_ranks_at_a_place(world4: World) -> None:
    assert world4.run(lambda: Mesh(dp=2, tp=2).rank_at(dp=1)) == [2, 3, 2, 3]
    said = world4.run(lambda: repr(Mesh(dp=2, tp=2)))[3]
    assert said == "Mesh(dp=2, tp=2; this is rank 3 at {'dp': 1, 'tp': 1})"


def test_wrong_sizes_are_refused_with_sizes_that_fit() -> None:
    words = ("needs 6 ranks, but there are 8; choose (dp=2, tp=4) or", "(dp=4, tp=2)")
    raises(words, check_sizes, {"dp": 2, "tp": 3}, 8)
    raises(r"there are 7; choose \(dp=7\)$", check_sizes, {"dp": 4}, 7)
    for wrong in ({}, {"coordinates": 2}, {"_x": 2}, {"comm": 2}):
        raises("a mesh needs named axes", check_sizes, wrong, 2)
    for size in (0, -2, 1.5, "2"):
        raises("whole number, 1 or more", check_sizes, {"dp": size}, 2)

    raises("512 ranks is too large to draw", plot.mesh, {"dp": 8, "tp": 64})


@on_each_rank("world2")
def test_places_and_axes_that_are_not_there() -> None:
    sizes = {"dp": 2, "tp": 3}
    raises("rank 6 is not in a mesh of 6 ranks; choose 0 to 5", coordinates, sizes, 6)
    raises("no axis 'pp'", rank_at, sizes, {"dp": 0, "tp": 0, "pp": 0})
    raises("tp=3: choose 0 to 2", rank_at, sizes, {"dp": 0, "tp": 3})
    mesh, words = Mesh(dp=2, cp=1, tp=1), "no axis 'pp'; it has dp, cp, tp"
    raises(words, mesh.__getitem__, "pp", error=KeyError)
    raises(words, getattr, mesh, "pp", error=AttributeError)
    raises(words, mesh.__getitem__, ("dp", "pp"), error=KeyError)
    for wrong in ((), ("dp", "dp")):
        raises("pass one or more distinct axes", mesh.__getitem__, wrong, error=KeyError)
    assert mesh["dp", "cp"] is mesh.dp, "an axis of one rank adds nothing to a group"
    assert mesh["cp", "tp"].ranks == (mesh.comm.rank,)


def test_one_rank_is_one_rank() -> None:
    assert [ranks_in_words(size) for size in (1, 2, 1024)] == ["1 rank", "2 ranks", "1,024 ranks"]
    raises("rank 1 is not in a mesh of 1 rank; choose 0 to 0$", coordinates, {"dp": 1}, 1)
    raises(r"needs 1 rank, but there are 2", check_sizes, {"dp": 1}, 2)
    with World(1) as alone:
        assert alone.picked.startswith("1 rank, ")
        assert " 1 ranks" not in alone.run(lambda: str(Comm().explain("all_reduce", 8)))[0]


def test_factorisations() -> None:
    assert sorted(factorizations(12, 2)) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert len(list(factorizations(8, 3))) == 10


def drawn(sizes: dict[str, int], ranks_per_node: int | None = None) -> tuple[Any, Any]:
    figure = plot.mesh(sizes, ranks_per_node)
    figure.canvas.draw()
    return figure, figure.axes[0]


def links_of(axes: Any) -> list[LineCollection]:
    return [links for links in axes.collections if isinstance(links, LineCollection)]


@pytest.mark.parametrize("sizes", SHAPES)
def test_the_picture_has_every_rank_apart_and_every_link(sizes: dict[str, int]) -> None:
    figure, axes = drawn(sizes)
    size = prod(sizes.values())
    assert [text.get_text() for text in axes.texts] == [str(rank) for rank in range(size)]
    places = combinations([text.get_position() for text in axes.texts], 2)
    apart = [max(abs(x - u), abs(y - v)) for (x, y), (u, v) in places]
    assert min(apart, default=1) > 0.9
    counts = [len(links.get_segments()) for links in links_of(axes)]
    assert counts == [size // n * (n - 1) for n in reversed(sizes.values())]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [f"{axis} = {n}" for axis, n in sizes.items()]


def test_links_between_nodes_are_dashed() -> None:
    tp, dp, pp = links_of(drawn({"pp": 2, "dp": 2, "tp": 2}, 4)[1])
    dashed = [[bool(on) for _, on in links.get_linestyle()] for links in (tp, dp, pp)]
    assert dashed == [[False] * 4, [False] * 4, [True] * 4]


def test_an_axis_keeps_its_colour_in_every_order() -> None:
    def colours(**sizes: int) -> dict[str, Any]:
        (legend,) = drawn(sizes)[0].legends
        names = [text.get_text().split()[0] for text in legend.get_texts()]
        lines = [line.get_color() for line in legend.get_lines()]
        return dict(zip(names, lines, strict=True))

    usual = colours(pp=2, dp=2, tp=2)
    assert colours(tp=2, pp=2, dp=2) == usual and len(set(usual.values())) == 3
    mixed = colours(ep=2, tp=2, cp=2)
    assert mixed["tp"] == usual["tp"] and len(set(mixed.values())) == 3
