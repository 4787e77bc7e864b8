"""Which algorithm runs, and what is said about it."""

import re

import pytest
import torch

from labkit import Comm, Link, RankError, World, listen
from labkit.comm.collectives import ALGORITHMS, POWERS_OF_TWO_ONLY
from labkit.runtime.transports.chooser import Chooser, overrides, stored_table
from tables import cases, raises
from worlds import on_each_rank, world_fixture

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
        assert chooser.choose("all_reduce", nbytes, gloo_can=True) == name
    assert chooser.choose("all_reduce", 1000, gloo_can=False) == "ring"


def test_the_nearest_number_of_ranks_below_decides_and_must_allow_it() -> None:
    names = [Chooser(n, table=TABLE).choose("all_reduce", 100) for n in (1, 2, 3, 4, 9)]
    assert names == ["tree", "tree", "tree", "double_tree", "double_tree"]
    names = [Chooser(n, table=TABLE).choose("all_gather", 0) for n in (2, 3, 4, 6, 8)]
    doubling, bruck = "recursive_doubling", "bruck"
    assert names == [doubling, bruck, doubling, bruck, doubling]


def test_a_call_overrules_the_environment_and_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_ALGO", " all_reduce:ring, all_gather:recursive_doubling")
    chooser = Chooser(4, table=TABLE)
    assert chooser.choose("all_reduce", 5) == "ring"
    assert chooser.choose("all_reduce", 5, asked="naive") == "naive"
    assert chooser.choose("reduce", 5) == "flat"
    assert "LABKIT_ALGO requests it" in str(chooser.explain("all_reduce", 5))
    assert "the call requests it" in str(chooser.explain("all_reduce", 5, asked="naive"))
    three = Chooser(3, table=TABLE)  # cannot use the algorithm in LABKIT_ALGO
    assert three.choose("all_gather", 5) == "bruck"
    assert "LABKIT_ALGO requests recursive_doubling, but" in three.explain("all_gather", 5).why


@cases(
    ("all_reduce:best", "all_reduce has no algorithm 'best'; choose one of naive, tree, ring"),
    ("allreduce:ring", "'allreduce:ring' is not collective:algorithm; the collectives are bro"),
    ("all_reduce", "'all_reduce' is not collective:algorithm"),
    ("broadcast:gloo", "broadcast has no algorithm 'gloo'; choose one of flat, tree, chain"),
)
def test_bad_names_in_the_environment_are_errors_that_list_the_good_ones(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_ALGO", text)
    raises(says, Chooser, 2)
    assert overrides("") == {} and overrides("reduce:chain,") == {"reduce": "chain"}


def test_bad_names_in_a_call_are_errors() -> None:
    choose = Chooser(3).choose
    gloos = "gloo's own all-reduce supports only float32 and float64, no mean"
    raises("has no algorithm 'best'; choose one of", choose, "all_reduce", 1, True, "best")
    raises(gloos, choose, "all_reduce", 1, False, "gloo")
    power = "needs a power of two ranks, not 3; choose one of"
    raises(power, choose, "all_gather", 1, asked="recursive_doubling")
    unknown = "'allreduce' is not a collective; choose one of broadcas"
    raises(unknown, Chooser(3).explain, "allreduce", 1)


def test_the_explanation_has_the_threshold_and_the_source_of_the_table() -> None:
    chooser = Chooser(4, table=TABLE)
    assert str(chooser.explain("all_reduce", 500, gloo_can=True)) == (
        "all_reduce by double_tree: 500 bytes on 4 ranks; the table says double_tree "
        "from 100 to 999. Source of the table: made up"
    )
    assert "says gloo from 1000 bytes on. Source" in str(chooser.explain("all_reduce", 5000, True))
    said = str(chooser.explain("all_reduce", 5000, gloo_can=False))
    assert said.startswith("all_reduce by ring") and "not available here, so ring is used" in said
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
                    name = chooser.choose(collective, nbytes, gloo_can=own)
                    assert name in ALGORITHMS[collective] or (name == "gloo" and own)
                    assert (collective, name) not in POWERS_OF_TWO_ONLY or n & (n - 1) == 0
    for collective in ("gather", "scatter", "all_to_all"):  # sizes may differ between ranks
        for rows in table[collective].values():
            assert len(rows) == 1


# --- at the door -------------------------------------------------------------------------------


gloo2, modelled2 = world_fixture(2, backend="gloo"), world_fixture(2, link=Link(gbps=1000))


@on_each_rank("gloo2")
def test_events_and_explanations_name_what_runs() -> None:
    comm, small, large = Comm(), torch.ones(4), torch.ones(1 << 21)
    calls = [
        (small, "sum", ""), (large, "sum", ""), (large, "mean", ""),
        (large.to(torch.bfloat16), "sum", ""), (small, "sum", "naive"), (small, "sum", "gloo"),
    ]  # fmt: skip
    with listen() as events:
        for x, op, name in calls:
            comm.all_reduce(x, op, algorithm=name)
        comm.send(small, 1) if comm.rank == 0 else comm.recv(small, 0)
    names = [event.algorithm for event in events]
    choices = [comm.explain("all_reduce", x.nbytes, name, op, x.dtype) for x, op, name in calls]
    assert names == [*(choice.algorithm for choice in choices), ""]
    assert names[4:] == ["naive", "gloo", ""] and "gloo" in names[:2] and "gloo" not in names[2:4]
    assert "on 2 ranks" in str(choices[1]) and stored_table()["source"] in str(choices[1])


@cases(
    ("gloo", [("naive", "gloo"), ("flat", "gloo"), ("dissemination", "gloo")]),
    ("shm", [("naive", "gloo"), ("flat", "gloo"), ("slots", "shm")]),
    ids=["gloo", "shm"],
)
def test_the_environment_decides_for_a_world_and_names_algorithms_of_messages(
    transport: str, used: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_ALGO", "all_reduce:naive,broadcast:flat")

    def names() -> list[tuple[str, str]]:
        comm = Comm()
        with listen() as events:
            comm.all_reduce(torch.ones(4))
            comm.broadcast(torch.ones(4))
            comm.barrier()
        return [(event.algorithm, event.transport) for event in events]

    with World(2, transport=transport) as world:
        assert world.run(names) == [used] * 2


@on_each_rank("modelled2")
def test_a_modelled_wire_never_takes_gloos_own() -> None:
    with listen() as events:
        Comm().all_reduce(torch.ones(1 << 21))
    assert events[0].algorithm == "ring"
    assert str(Comm().explain("all_reduce", 1 << 23)).startswith("all_reduce by ring:")


@on_each_rank("world2")
def test_names_that_cannot_serve_are_refused_before_anything_moves() -> None:
    comm, x = Comm(), torch.ones(3)
    shapes = re.escape("ring_exchange: out is float32 [3], but x is float32 [4]; make them equal")
    with listen() as events:
        raises("choose one of naive, tree", comm.all_reduce, x, algorithm="best")
        raises("supports only float32 and float64", comm.all_reduce, x.long(), algorithm="gloo")
        raises("choose one of flat, tree, chain", comm.broadcast, x, algorithm="ring")
        raises(shapes, comm.ring_exchange, x, torch.ones(4))
    assert not events
    comm.barrier()


def test_ranks_that_choose_differently_are_reported(world2: World) -> None:
    def differ() -> None:
        comm = Comm()
        comm.all_reduce(torch.ones(3), algorithm=("tree", "ring")[comm.rank])

    raises("(?s)disagree about.*by tree.*by ring", world2.run, differ, error=RankError)


def test_a_tree_of_unequal_sizes_is_refused(world2: World) -> None:
    def gather() -> None:
        comm = Comm()
        outs = [torch.ones(1), torch.ones(2)] if comm.rank == 0 else None
        comm.gather(torch.ones(1 + comm.rank), outs, algorithm="tree")

    words = "gather by tree needs equal sizes on all ranks, not"
    raises(words, world2.run, gather, error=RankError)
