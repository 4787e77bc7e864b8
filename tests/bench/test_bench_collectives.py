"""The bench of the collectives: wrong elements, the chooser's table, the command."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from command import command
from labkit import Comm, World, bench, listen, read_run, record
from labkit.bench import chooser_table, collectives, sweep_tables
from labkit.bench.calls import Buffers, NativeCalls, call_of, expected, input_of
from labkit.bench.collectives import COPY, Case, Timed, _on_rank, _typical
from labkit.cli import bench as bench_commands
from labkit.comm.collectives import ALGORITHMS
from labkit.runtime.transports.chooser import Chooser, read_table, stored_table, table_note
from labkit.sweeps import alpha_beta, sweep
from labkit.sweeps.sweep import BUS_FACTORS, DEFAULT, REDUCING, Sweep, read_sweep
from sweep_cases import ABOUT, OPS, SIZES, modelled, points_of
from tables import cases, raises


def test_the_factors_and_sizes_are_those_of_the_doors_events(world2: World) -> None:
    def check(op: str) -> None:
        comm = Comm()
        buffers = Buffers(op, comm.rank, comm.size, 8, torch.float32, torch.device("cpu"))
        buffers.zero()
        with listen() as heard:
            call_of(comm, buffers, "sum", "")()
        ops = ["recv", "send"] if op == "there_and_back" else [op]
        assert sorted(event.op for event in heard) == ops
        nbytes = buffers.output.nbytes
        if comm.rank == 0:
            assert heard[0].payload_bytes == nbytes == sweep.count_of(op, 2, nbytes, 4)[1]
            assert sum(event.bus_bytes for event in heard) == BUS_FACTORS[op](2) * nbytes

    for op in OPS:
        world2.run(check, op)


def test_nothing_that_all_give_is_alike_and_what_did_not_come_is_counted() -> None:
    given = [input_of(rank, 300) for rank in range(3)]
    assert all((given[a] != given[b]).sum() > 150 for a, b in [(0, 1), (0, 2), (1, 2)])
    assert set(torch.cat(given).tolist()) == {0, 1, 2}
    for op, rank in product(OPS, (0, 1)):
        buffers = Buffers(op, rank, 2, 100, torch.bfloat16, torch.device("cpu"))
        buffers.fill()
        right = expected(buffers, "sum")
        keeps = (op in ("reduce", "gather") and rank == 1) or (op == "broadcast" and rank == 0)
        assert (buffers.wrong(right) > 30) != keeps, op
        buffers.output.copy_(right)
        assert buffers.wrong(right) == 0
        buffers.output[-1] += 1
        assert buffers.wrong(right) == 1
        buffers.output.fill_(torch.nan)
        assert buffers.wrong(right) == buffers.numel


@pytest.mark.parametrize("ranks", [2, 3])
@cases(
    ("product", "float32"), ("product", "bfloat16"), ("product", "int64"), ("product", "uint8"),
    ("sum", "float32"), ("min", "float32"), ("max", "float32"),
)  # fmt: skip
def test_all_operations_give_the_expected(redop: str, dtype: str, ranks: int, worlds: Any) -> None:
    """Of three ranks, the last has no neighbour to send there and back."""

    def wrongs() -> dict[tuple[str, str], int]:
        comm, counts = Comm(), {}
        kind = getattr(torch, dtype), torch.device("cpu")
        for op, calls in product(OPS, (comm, NativeCalls(comm.group, "gloo"))):
            buffers = Buffers(op, comm.rank, comm.size, 33, *kind)
            buffers.fill()
            call_of(calls, buffers, redop, "")()
            counts[op, type(calls).__name__] = buffers.wrong(expected(buffers, redop))
        return counts

    for counts in worlds(ranks).run(wrongs):
        assert set(counts.values()) == {0} and len(counts) == 2 * len(OPS), counts


def test_the_elements_of_a_wrong_algorithm_are_counted(world2: World) -> None:
    def timed(case: Case) -> dict[str, Any]:
        def does_nothing(wire: Any, x: torch.Tensor, *_: Any) -> Any:
            yield from ()
            return 0

        from labkit.comm.collectives import ALGORITHMS  # the rank's own, not a copy of this one's

        with patch.dict(ALGORITHMS["all_reduce"], ring=does_nothing):
            return _on_rank(case)

    case = Case("all_reduce", 1000, "float32", "sum", (DEFAULT, "ring", "tree"), 2, check=True)
    chosen = world2.run(lambda: Comm().explain("all_reduce", 4000).algorithm)[0]
    for rank, timed_by in enumerate(world2.run(timed, case)):
        alone, both = input_of(rank, 1000), input_of(0, 1000) + input_of(1, 1000)
        assert timed_by["ring"].wrong == (alone != both).sum() > 500
        assert timed_by["tree"].wrong == timed_by[DEFAULT].wrong == timed_by[""].wrong == 0
        assert timed_by[DEFAULT].chosen == chosen and timed_by["tree"].chosen == "tree"
        assert all(len(x.seconds) == 2 and min(x.seconds) > 0 for x in timed_by.values())
    unchecked = world2.run(_on_rank, replace(case, check=False))
    assert {timed.wrong for timed in unchecked[0].values()} == {None}


def test_wrong_elements_of_all_ranks_are_added_up_and_the_slowest_rank_counts() -> None:
    others = {"": Timed("gloo", [4.0], 0), COPY: Timed("", [1.0], None)}
    of_ranks = [{"ring": Timed("ring", [2.0], wrong), **others} for wrong in (3, 4)]
    case = Case("all_reduce", 10, "float32", "sum", (DEFAULT, "ring"), 1, check=True)
    ring, own = collectives._points(case, 2, 40, "gloo", of_ranks)
    assert (ring.algorithm, ring.wrong, ring.ratio, ring.copy_s) == ("ring", 7, 0.5, 1.0)
    assert (own.algorithm, own.own, own.wrong, own.ratio) == ("gloo", True, 0, 1.0)
    assert _typical([[1.0, 5.0, 4.0], [3.0, 2.0, 9.0]]) == 5.0  # of the turns 3, 5 and 9
    assert _typical([[1.0], [2.0]]) == 2.0


def test_the_caption_names_the_time_that_was_taken() -> None:
    points = modelled("all_gather", 2, "ring", 1e-5, 1e-9)
    (table,) = sweep_tables.tables(Sweep(points, {**ABOUT, "time": collectives.STATISTIC}))
    assert table.caption == f"time: {collectives.STATISTIC}"
    (older,) = sweep_tables.tables(Sweep(points, ABOUT))  # of an older labkit
    assert older.caption == ""


def test_a_sweep_on_two_ranks_has_a_line_for_everything_and_comes_back(tmp_path: Path) -> None:
    swept = bench.bench_collectives([256, 1024], ["all_reduce", "gather"], [2], turns=1)
    kinds = {(point.op, point.size_bytes, point.algorithm, point.own) for point in swept.points}
    names = {"all_reduce": [*ALGORITHMS["all_reduce"]], "gather": ["flat", "tree"]}
    names["all_reduce"].remove("hierarchical")
    assert kinds == {
        (op, size, name, name == "gloo")
        for op in names for size in (256, 1024) for name in (DEFAULT, "gloo", *names[op])
    }  # fmt: skip
    for point in swept.points:
        (own,) = (o for o in swept.of(point.op, 2, "gloo") if o.size_bytes == point.size_bytes)
        assert point.time_s > 0 and point.wrong == 0 and own.ratio == 1
        assert point.copy_s == own.copy_s > 0
        assert point.ratio == pytest.approx(point.time_s / own.time_s)
        assert point.root == (0 if point.op == "gather" else None)
        assert point.redop == ("sum" if point.op in REDUCING else "")
    assert [table.row_count for table in sweep_tables.tables(swept)] == [16, 8]
    assert read_sweep(swept.save(tmp_path / "new" / "sweep.json")) == swept
    assert swept.about["backend"] == "gloo" and swept.about["table"] == table_note()


def test_algorithms_that_cannot_serve_are_left_out() -> None:
    assert "recursive_doubling" in collectives._supported("all_gather", 4, None)
    assert "recursive_doubling" not in collectives._supported("all_gather", 3, None)
    assert collectives._supported("all_reduce", 3, ["hierarchical", "flat"]) == ["hierarchical"]


def test_a_poor_fit_is_said_to_be_poor() -> None:
    good = alpha_beta.Fit("all_reduce", 2, "ring", 1e-5, 1e-9, error=0.25)
    poor, worst = replace(good, error=0.26), replace(good, algorithm="tree", error=0.8)
    assert sweep_tables.doubts([good]) == sweep_tables.doubts([]) == ""
    said = sweep_tables.doubts([good, poor, worst])
    assert said.startswith("2 of 3 fits have errors above 25%")
    assert "all_reduce by tree on 2 ranks: 80%" in said and "Do not trust" in said


def made_up_sweep() -> Sweep:
    """On 4 ranks: recursive doubling for small, gloo's own for large; noise of a few per cent."""
    points = []
    for op, algorithm, small_s, large_s in [
        ("all_reduce", "recursive_doubling", 1.0, 1.0),
        ("all_reduce", "tree", 0.95, 0.95),  # as good, more steps
        ("all_reduce", "ring", 2.0, 0.85),
        ("all_reduce", "gloo", 3, 0.5),
        ("all_reduce", DEFAULT, 0.01, 0.01),
        ("all_gather", "recursive_doubling", 1.0, 1.0),
        ("all_gather", "bruck", 1.5, 1.5),
        ("all_gather", "ring", 1.4, 1.4),
        ("all_gather", "gloo", 0.01, 0.01),
        ("gather", "tree", 1.0, 1.0),
    ]:
        seconds = {size: small_s if size < 1 << 20 else large_s for size in SIZES}
        points += points_of(op, 4, algorithm, seconds, own=algorithm == "gloo")
    return Sweep(points, ABOUT)


def test_a_table_has_the_fastest_and_ignores_what_is_noise(tmp_path: Path) -> None:
    path = chooser_table.write_table(made_up_sweep(), tmp_path / "new" / "table.json")
    table = read_table(path)
    assert table["all_reduce"] == {"4": [
        {"from_bytes": 0, "algorithm": "recursive_doubling"},
        {"from_bytes": 1 << 20, "algorithm": "gloo", "otherwise": "ring"},
    ]}  # fmt: skip
    gather = {"from_bytes": 0, "algorithm": "recursive_doubling", "otherwise": "ring"}
    assert table["all_gather"] == {"4": [gather]}
    for collective in ALGORITHMS.keys() - {"all_reduce", "all_gather"}:
        assert table[collective] == stored_table()[collective]
    assert "gloo on made up, 2 cores" in table["source"] and "4096 to 67108864" in table["source"]
    assert {(one["op"], one["algorithm"]) for one in table["fits"]} >= {("all_reduce", "ring")}
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]
    chooser = Chooser(6, table=table)
    assert chooser.choose("all_reduce", 1 << 20, gloo_can=True) == "gloo"
    assert chooser.choose("all_reduce", 1 << 20) == "ring"
    assert chooser.choose("all_reduce", (1 << 20) - 1) == "recursive_doubling"
    assert chooser.choose("all_gather", 5) == "ring"  # 6 ranks are no power of two


def test_what_gives_no_table_is_refused() -> None:
    made_up = made_up_sweep()
    for points, about, says in [
        (made_up.points, {**ABOUT, "backend": "nccl"}, "NCCL chooses its algorithms itself"),
        (made_up.points, {**ABOUT, "transport": "shm"}, "share memory and use no table"),
        (made_up.of("gather", 4), ABOUT, "has a table; measure one of all_reduce, all_gather"),
        (made_up.of("all_reduce", 4, "gloo"), ABOUT, "no measured algorithm supports every call"),
    ]:
        raises(says, chooser_table.table_of, Sweep(points, about))


def changed(**rows: Any) -> str:
    return json.dumps({**stored_table(), **rows})


@cases(
    ("", "is not a table of algorithms"),
    ("[]", "its source is missing"),
    (changed(source=3), "its source is missing"),
    (changed(reduce={}), "reduce is missing"),
    (changed(reduce={"two": []}), "reduce must map numbers of ranks to lists of rows"),
    (changed(reduce={"2": [{"from": 0}]}), "reduce on 2 ranks: a row needs `from_bytes`"),
    (changed(reduce={"2": []}), "and one must be 0"),
    (changed(reduce={"2": [{"from_bytes": 1, "algorithm": "tree"}]}), "and one must be 0"),
    (changed(reduce={"2": [{"from_bytes": 0, "algorithm": "ring", "otherwise": "tree"}]}),
     "no algorithm 'ring'"),
    (changed(reduce={"2": [{"from_bytes": 0, "algorithm": "tree", "otherwise": "ring"}]}),
     "no algorithm 'ring'"),
    (changed(all_reduce={"2": [{"from_bytes": 0, "algorithm": "gloo"}]}), "gloo cannot run every"),
    (changed(all_gather={"3": [{"from_bytes": 0, "algorithm": "recursive_doubling"}]}),
     "all_gather on 3 ranks: recursive_doubling cannot run every"),
    (changed(gather={"2": [{"from_bytes": 0, "algorithm": "tree"}]}), "tree cannot run every"),
)  # fmt: skip
def test_a_table_that_cannot_serve_is_refused_with_the_reason(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    monkeypatch.setenv("LABKIT_TABLE", str(path))
    raises((says, str(path), "unset LABKIT_TABLE to use labkit's own"), Chooser, 2)
    assert table_note()["file"] == str(path)
    monkeypatch.setenv("LABKIT_TABLE", str(tmp_path / "missing.json"))
    raises("missing.json is not a table of algorithms: .*No such file", Chooser, 2)


def test_a_custom_table_is_used_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naive = {"2": [{"from_bytes": 0, "algorithm": "naive"}]}
    path = tmp_path / "custom.json"
    path.write_text(changed(source="measured here", all_reduce=naive))
    own = table_note()
    assert own["file"] == "labkit/runtime/transports/table.json"
    assert own["source"] == stored_table()["source"]

    def traffic() -> tuple[str, str]:
        comm = Comm()
        with listen() as events:
            comm.all_reduce(torch.ones(4))
        return events[0].algorithm, str(comm.explain("all_reduce", 16))

    monkeypatch.setenv("LABKIT_TABLE", str(path))
    with World(2, transport="gloo") as world:
        monkeypatch.delenv("LABKIT_TABLE")  # the ranks have it since their birth
        with record(tmp_path / "run") as trace:
            said = world.run(traffic)
    for name, explained in said:
        assert name == "naive"
        assert f"Source of the table: {path} (LABKIT_TABLE): measured here" in explained
    note = read_run(tmp_path / "run").about["table"]
    assert note == trace.about["table"]
    assert (note["file"], note["source"]) == (str(path), "measured here")
    assert len(note["sha256"]) == 64 and note["sha256"] != own["sha256"]
    with record(tmp_path / "alone"):
        pass
    assert read_run(tmp_path / "alone").about["table"] == own


@pytest.mark.slow
def test_the_command_measures_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_TRANSPORT", "shm")  # a table is about messages all the same
    saved, picture, table = (
        tmp_path / name for name in ("sweep.json", "picture.png", "table.json")
    )
    shown = command(
        "bench collectives --from 512 --to 1K --factor 2 --ops all_reduce --ranks 2 --turns 1 "
        f"--save={saved} --plot={picture} --fit --table={table}"
    )
    for said in ("size, B", "#wrong", "gloo's own", "alpha, us", "export LABKIT_TABLE=",
                 'Only messages use the table, as in World(n, transport="gloo")'):  # fmt: skip
        assert said in shown
    swept = read_sweep(saved)
    assert swept.about["transport"] == "gloo"
    assert read_table(table)["all_reduce"].keys() == {"2"}
    assert {point.size_bytes for point in swept.points} == {512, 1024}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_wrong_elements_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sick = [replace(point, wrong=3) for point in modelled("all_reduce", 2, "ring", 1e-5, 1e-9)[:1]]
    monkeypatch.setattr(collectives, "bench_collectives", lambda *_: Sweep(sick, ABOUT))
    assert "wrong: 3 elements" in command("bench collectives", 1)


@cases(("float64", 3.5), ("float32", 5), ("float16", 8), ("uint8", 14))
def test_checks_count_as_memory(dtype: str, times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given and got has the dtype; what is expected, the whole numbers of int32."""
    size, ranks = 1 << 20, 2
    args = bench.bench_collectives, [size], ["all_reduce"], [ranks]
    monkeypatch.setattr(collectives, "World", None)
    monkeypatch.setattr(collectives, "available_bytes", lambda: times * size * ranks - 1)
    raises("end at a smaller size", *args, dtype=dtype)
    monkeypatch.setattr(collectives, "available_bytes", lambda: times * size * ranks)
    raises("", *args, dtype=dtype, error=TypeError)  # on to the world, which is none here


def test_all_benches_run_or_the_named_bench_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    benches = bench_commands.bench.registered_commands
    names = [one.callback.__name__ for one in benches]
    for one, name in zip(benches, names):
        monkeypatch.setattr(one, "callback", lambda name=name: ran.append(name))
    command("bench")
    assert ran == names
    assert {"data_parallel", "collectives", "transfers", "replay"} <= {*ran}
    monkeypatch.undo()
    command("bench collectives --ops barrier", 2)
    assert ran == names
