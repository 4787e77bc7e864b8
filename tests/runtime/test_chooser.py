"""Which algorithm runs, and what is said about it."""

from typing import Any

import pytest
import torch

from labkit import Comm, Link, RankError, World, listen
from labkit.comm.collectives import ALGORITHMS, POWERS_OF_TWO_ONLY
from labkit.runtime.transports.chooser import Choice, Chooser, overrides, stored_table
from worlds import on_each_rank

TABLE = {
    "source": "made up",
    **{
        collective: {"2": [{"from_bytes": 0, "algorithm": next(iter(named))}]}
        for collective, named in ALGORITHMS.items()
    },
    "all_reduce": {
        "2": [{"from_bytes": 0, "algorithm": "tree"}],
        "4": [
            {"from_bytes": 1000, "algorithm": "gloo", "otherwise": "ring"},
            {"from_bytes": 0, "algorithm": "recursive_doubling"},
            {"from_bytes": 100, "algorithm": "double_tree"},
        ],
    },
    "all_gather": {
        "2": [{"from_bytes": 0, "algorithm": "recursive_doubling", "otherwise": "bruck"}]
    },
}  # fmt: skip


def test_the_largest_threshold_that_is_reached_decides() -> None:
    chooser = Chooser(4, table=TABLE)
    for nbytes, name in [
        (0, "recursive_doubling"), (99, "recursive_doubling"), (100, "double_tree"),
        (999, "double_tree"), (1000, "gloo"), (1 << 40, "gloo"),
    ]:  # fmt: skip
        assert chooser.choose("all_reduce", nbytes, own_can=True) == name
    assert chooser.choose("all_reduce", 1000, own_can=False) == "ring"


def test_the_nearest_number_of_ranks_below_decides_and_must_allow_it() -> None:
    names = [Chooser(n, table=TABLE).choose("all_reduce", 100) for n in (1, 2, 3, 4, 9)]
    assert names == ["tree", "tree", "tree", "double_tree", "double_tree"]
    names = [Chooser(n, table=TABLE).choose("all_gather", 0) for n in (2, 3, 4, 6, 8)]
    assert names == [
        "recursive_doubling", "bruck", "recursive_doubling", "bruck", "recursive_doubling"
    ]  # fmt: skip


def test_a_call_overrules_the_environment_and_that_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LABKIT_ALGO", " all_reduce:ring, all_gather:recursive_doubling")
    chooser = Chooser(4, table=TABLE)
    assert chooser.choose("all_reduce", 5) == "ring"
    assert chooser.choose("all_reduce", 5, asked="naive") == "naive"
    assert chooser.choose("reduce", 5) == "flat"
    assert "LABKIT_ALGO asks for it" in str(chooser.explain("all_reduce", 5))
    assert "the call asks for it" in str(chooser.explain("all_reduce", 5, asked="naive"))
    three = Chooser(3, table=TABLE)  # where what the environment asks for cannot serve
    assert three.choose("all_gather", 5) == "bruck"
    assert "LABKIT_ALGO asks for recursive_doubling, but" in three.explain("all_gather", 5).why


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all_reduce:best", "all_reduce has no algorithm 'best'; choose one of naive, tree, ring"),
        ("allreduce:ring", "'allreduce:ring' is not collective:algorithm; the collectives are bro"),
        ("all_reduce", "'all_reduce' is not collective:algorithm"),
        ("broadcast:gloo", "broadcast has no algorithm 'gloo'; choose one of flat, tree, chain"),
    ],
)
def test_bad_names_in_the_environment_are_errors_that_list_the_good_ones(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_ALGO", text)
    with pytest.raises(ValueError) as told:
        Chooser(2)
    assert says in str(told.value)
    assert overrides("") == {} and overrides("reduce:chain,") == {"reduce": "chain"}


def test_bad_names_in_a_call_are_errors() -> None:
    chooser = Chooser(3)
    for asked, own_can, says in [
        ("best", True, "all_reduce has no algorithm 'best'; choose one of"),
        ("gloo", False, "gloo's own all-reduce serves float32 and float64, no mean"),
    ]:
        with pytest.raises(ValueError, match=says):
            chooser.choose("all_reduce", 1, own_can, asked)
    with pytest.raises(ValueError, match="needs a power of two of ranks, not 3; choose one of"):
        chooser.choose("all_gather", 1, asked="recursive_doubling")
    with pytest.raises(ValueError, match="'allreduce' is not a collective; choose one of broadcas"):
        chooser.explain("allreduce", 1)


def test_the_explanation_has_the_threshold_and_the_source_of_the_table() -> None:
    chooser = Chooser(4, table=TABLE)
    assert str(chooser.explain("all_reduce", 500, own_can=True)) == (
        "all_reduce by double_tree: 500 bytes on 4 ranks; the table says double_tree "
        "from 100 to 999. The table: made up"
    )
    assert "says gloo from 1000 bytes on. The" in str(chooser.explain("all_reduce", 5000, True))
    said = str(chooser.explain("all_reduce", 5000, own_can=False))
    assert said.startswith("all_reduce by ring") and "cannot serve here: ring in its stead" in said
    for collective in ALGORITHMS:  # it says what is done, always
        for nbytes in (0, 100, 1000):
            choice = chooser.explain(collective, nbytes)
            assert choice.algorithm == chooser.choose(collective, nbytes)


def test_the_stored_table_names_what_there_is_and_says_how_it_was_made() -> None:
    table = stored_table()
    assert len(table["source"]) > 50
    assert table.keys() == {"source", *ALGORITHMS}
    for n in range(1, 130):
        chooser = Chooser(n)
        for own in (False, True):
            for collective in ALGORITHMS:
                for nbytes in (0, 1, 1 << 12, 1 << 18, 1 << 24, 1 << 34):
                    name = chooser.choose(collective, nbytes, own_can=own)
                    assert name in ALGORITHMS[collective] or (name == "gloo" and own)
                    assert (collective, name) not in POWERS_OF_TWO_ONLY or n & (n - 1) == 0
    for collective in ("gather", "scatter", "all_to_all"):  # sizes may differ between ranks
        for rows in table[collective].values():
            assert len(rows) == 1


# --- at the door -------------------------------------------------------------------------------


def test_events_and_explanations_name_what_runs() -> None:
    def call() -> tuple[list[str], list[str], Choice]:
        comm = Comm()
        small, large = torch.ones(4), torch.ones(1 << 21)
        with listen() as events:
            comm.all_reduce(small)
            comm.all_reduce(large)
            comm.all_reduce(large, "mean")
            comm.all_reduce(large.to(torch.bfloat16))
            comm.all_reduce(small, algorithm="naive")
            comm.all_reduce(small, algorithm="gloo")
            comm.send(small, 1) if comm.rank == 0 else comm.recv(small, 0)
        explained = [
            comm.explain("all_reduce", small.nbytes), comm.explain("all_reduce", large.nbytes),
            comm.explain("all_reduce", large.nbytes, op="mean"),
            comm.explain("all_reduce", large.nbytes // 2, dtype=torch.bfloat16),
            comm.explain("all_reduce", small.nbytes, "naive"),
            comm.explain("all_reduce", small.nbytes, "gloo"),
        ]  # fmt: skip
        names = [event.algorithm for event in events]
        return names, [one.algorithm for one in explained], explained[1]

    with World(2, backend="gloo") as world:
        (names, explained, choice), _ = world.run(call)
    assert names[:-1] == explained and names[-1] == ""
    assert names[4:] == ["naive", "gloo", ""] and "gloo" in names[:2] and "gloo" not in names[2:4]
    assert "on 2 ranks" in str(choice) and stored_table()["source"] in str(choice)


def test_the_environment_decides_for_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_ALGO", "all_reduce:naive,broadcast:flat")

    def names() -> list[str]:
        comm = Comm()
        with listen() as events:
            comm.all_reduce(torch.ones(4))
            comm.broadcast(torch.ones(4))
            comm.barrier()
        return [event.algorithm for event in events]

    with World(2, backend="gloo") as world:
        assert world.run(names) == [["naive", "flat", "dissemination"]] * 2


def test_a_modelled_wire_never_takes_gloos_own() -> None:
    def names() -> list[str]:
        comm = Comm()
        with listen() as events:
            comm.all_reduce(torch.ones(1 << 21))
        return [event.algorithm for event in events] + [str(comm.explain("all_reduce", 1 << 23))]

    with World(2, link=Link(gbps=1000)) as world:
        for name, said in world.run(names):
            assert name == "ring" and said.startswith("all_reduce by ring:")


@on_each_rank("world2")
def test_names_that_cannot_serve_are_refused_before_anything_moves() -> None:
    comm, told = Comm(), []
    calls: list[Any] = [
        lambda: comm.all_reduce(torch.ones(3), algorithm="best"),
        lambda: comm.all_reduce(torch.ones(3).long(), algorithm="gloo"),
        lambda: comm.broadcast(torch.ones(3), algorithm="ring"),
        lambda: comm.ring_exchange(torch.ones(3), torch.ones(4)),
    ]
    with listen() as events:
        for call in calls:
            with pytest.raises(ValueError) as raised:
                call()
            told.append(str(raised.value))
    assert not events
    comm.barrier()
    assert "choose one of naive, tree" in told[0]
    assert "serves float32 and float64" in told[1]
    assert "choose one of flat, tree, chain" in told[2]
    assert "ring_exchange: out is float32 [3], x is float32 [4]; make them equal" in told[3]


def test_ranks_that_choose_differently_are_reported(world2: World) -> None:
    def differ() -> None:
        comm = Comm()
        comm.all_reduce(torch.ones(3), algorithm=("tree", "ring")[comm.rank])

    with pytest.raises(RankError, match="(?s)disagree about.*by tree.*by ring"):
        world2.run(differ)


def test_a_tree_of_unequal_sizes_is_refused(world2: World) -> None:
    def gather() -> None:
        comm = Comm()
        outs = [torch.ones(1), torch.ones(2)] if comm.rank == 0 else None
        comm.gather(torch.ones(1 + comm.rank), outs, algorithm="tree")

    with pytest.raises(RankError, match="gather by tree needs one size on all ranks, not"):
        world2.run(gather)
