"""A run as a folder: whole, cut off anywhere, from several hosts, in the way of other files."""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import CommEvent, read_run, write_run
from labkit.trace import MemoryPoint, RankTrace, Span, Step, Trace, rankfile
from labkit.trace.folder import FORMAT, add_about, add_metrics, begin_run
from labkit.trace.rankfile import RankFile, read_rank_file
from tables import cases, raises
from traces import sample_trace


def event(seq: int, issued_s: float, ended_s: float = 0.0) -> CommEvent:
    return CommEvent(
        "all_reduce", "default", (0, 1), 0, seq, "float32", (4,), 16, 16, False,
        issued_s=issued_s, began_s=issued_s, ended_s=ended_s,
    )  # fmt: skip


def small(rank: int = 0) -> RankTrace:
    """One of each kind, and something open."""
    return RankTrace(
        rank, 2, "cpu", "n1",
        steps=[Step(0, 1.0, 2.0), Step(1, 2.0, 0.0, detail=True)],
        spans=[Span("forward", "blocks.0", 0, 1.25, 1.5, 1, "Block", 12, 34)],
        comms=[event(1, 1.5, 1.75), event(2, 2.25)],
        memory=[MemoryPoint(2.125, 1, (1, 2, 3, 4, 5, 6))],
    )  # fmt: skip


def records(rank: RankTrace) -> list[Any]:
    return [*rank.timed_records(), *rank.memory]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_trace_comes_back_as_it_was(ranks: int, tmp_path: Path) -> None:
    trace = sample_trace(ranks)
    assert write_run(trace, tmp_path / "run") == tmp_path / "run"
    back = read_run(tmp_path / "run")
    assert (back.ranks, back.metrics, back.complete) == (trace.ranks, trace.metrics, True)
    assert back.about.items() >= trace.about.items()
    assert "problems" not in back.about
    assert all(type(x.ranks) is tuple for one in back.ranks.values() for x in one.comms)
    names = {"metrics.jsonl", "run.json", *(f"rank{rank}.jsonl" for rank in range(ranks))}
    assert {file.name for file in (tmp_path / "run").iterdir()} == names


def test_open_and_incomplete_records_read_back_so(tmp_path: Path) -> None:
    other = RankTrace(1, 2, complete=False)
    back = read_run(write_run(Trace({0: small(), 1: other}), tmp_path / "run"))
    assert back.ranks[0].steps == [Step(0, 0.0, 1.0), Step(1, 1.0, 0.0, True)]
    assert back.ranks[0].comms[1].ended_s == 0.0
    assert back.ranks[0].complete and not back.ranks[1].complete
    problem = "rank1.jsonl has no end mark: the rank died, or is still running"
    assert back.about["problems"] == [problem]
    again = read_run(write_run(back, tmp_path / "again"))
    assert again.ranks == back.ranks
    assert again.about["problems"] == back.about["problems"]


def test_run_json_says_what_and_where(tmp_path: Path) -> None:
    notes = {"what": "ddp", "seed": 3, "command": "labkit run", "world_size": 4}
    run = begin_run(tmp_path / "a" / "run", notes)
    about = json.loads((run / "run.json").read_text())
    assert about.items() >= {"format": FORMAT, **notes}.items()
    for name in ("labkit", "host", "platform", "python", "torch", "started_at"):
        assert isinstance(about[name], str) and about[name]
    trace = read_run(run)
    assert not trace.complete
    assert trace.about["problems"] == ["no rank has written anything"]


def test_groups_of_any_ranks(tmp_path: Path) -> None:
    many = [tuple(range(1024)), (0, 8, 16, 24), (0, 1, 2, 4), (5,), (3, 2, 1, 0), (1, 1, 1, 1)]
    comms = [replace(event(i, 1.0 + i, 2.0 + i), ranks=ranks) for i, ranks in enumerate(many)]
    write_run(Trace({0: RankTrace(0, 1024, comms=comms)}), tmp_path / "run")
    assert [x.ranks for x in read_run(tmp_path / "run").ranks[0].comms] == many
    assert (tmp_path / "run" / "rank0.jsonl").stat().st_size < 4000


def test_a_run_that_cannot_be_begun_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        raises("", begin_run, tmp_path, {"mesh": {("dp", 0): 1}}, error=TypeError)
        assert not list(tmp_path.iterdir())
    begin_run(tmp_path)


def test_what_ends_later_is_written_again_and_the_later_line_wins(tmp_path: Path) -> None:
    file = RankFile(begin_run(tmp_path / "run"), RankTrace(0, 1, host="n1"))
    step, sent = Step(0, 1.0, 0.0), event(1, 1.5)
    file.append([step, sent])
    file.append([Span("user", "x", 0, 1.0, 1.25)])
    assert len((tmp_path / "run" / "rank0.jsonl").read_text().splitlines()) == 4  # none twice
    running = read_run(tmp_path / "run")
    assert not running.complete
    assert running.ranks[0].steps == [Step(0, 0.0, 0.0)]
    assert running.ranks[0].comms[0].ended_s == 0.0
    sent.wire_bytes, sent.ended_s = 7, 3.0
    file.append()
    seen = read_run(tmp_path / "run").ranks[0].comms
    assert [(x.wire_bytes, x.ended_s) for x in seen] == [(7, 2.0)]
    step.ended_s = 4.0
    file.mark_end()
    back = read_run(tmp_path / "run")
    assert back.complete
    assert back.ranks[0].steps == [Step(0, 0.0, 3.0)]
    assert len(back.ranks[0].comms) == len(back.ranks[0].spans) == 1
    file.append([Step(1, 4.0, 5.0)])  # goes on after an end mark
    between = read_run(tmp_path / "run")
    assert len(between.ranks[0].steps) == 2 and not between.complete
    assert "no end mark" in between.about["problems"][0]
    file.mark_end()
    file.close()
    assert read_run(tmp_path / "run").complete
    raises("another rank 0 is writing it", RankFile, tmp_path / "run", RankTrace(0, 1))


def test_a_record_may_end_while_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, packed = event(1, 1.5), rankfile._packed

    def another_thread_comes_between(value: Any) -> Any:
        if value == "float32":  # a field between `op` and `ended_s`
            one.op, one.wire_bytes, one.ended_s = "reduce", 5, 2.5
        return packed(value)

    file = RankFile(begin_run(tmp_path / "run"), RankTrace(0, 1))
    monkeypatch.setattr(rankfile, "_packed", another_thread_comes_between)
    file.append([one])
    file.close()
    (back,) = read_run(tmp_path / "run").ranks[0].comms
    assert (back.op, back.wire_bytes, back.ended_s) == ("reduce", 5, 1.0)


def test_metrics_are_appended_by_all(tmp_path: Path) -> None:
    write_run(Trace({0: RankTrace(0, 1)}, metrics=[{"step": 0, "loss": 2.5}]), tmp_path / "run")
    add_metrics(tmp_path / "run", [{"step": 1, "loss": np.float32(1.5)}])
    assert [x["loss"] for x in read_run(tmp_path / "run").metrics] == [2.5, 1.5]


@cases(
    ([("n1", 80.0, 1.7e9), ("n1", 81.0, 1.7e9 + 40)], [0.0, 1.0]),  # one monotonic clock
    ([("n1", 80.0, 1.7e9), ("n2", 5.0, 1.7e9 + 2), ("n2", 5.5, 1.7e9 + 99)], [0.0, 2.0, 2.5]),
    ([("n1", 80.0, 1.7e9 + 4), ("n2", 500.0, 1.7e9)], [4.0, 0.0]),  # switched on later
)
def test_ranks_share_the_clock_of_their_host_and_hosts_unix_time(
    clocks: list[tuple[str, float, float]], began_s: list[float], tmp_path: Path
) -> None:
    """Each rank has a step, the next second of its monotonic clock."""
    path = begin_run(tmp_path / "run")
    for rank, (host, monotonic_s, unix_s) in enumerate(clocks):
        file = RankFile(path, RankTrace(rank, len(clocks), host=host), (monotonic_s, unix_s))
        file.append([Step(0, monotonic_s, monotonic_s + 1), event(1, monotonic_s + 0.5)])
        file.close()
    trace = read_run(path)
    ranks = trace.ranks.values()
    times = [(x.steps[0].began_s, x.comms[0].issued_s, x.steps[0].ended_s) for x in ranks]
    assert times == [(x, x + 0.5, x + 1) for x in began_s]
    assert {rank.comms[0].ended_s for rank in ranks} == {0.0}  # open on all
    assert read_run(write_run(trace, tmp_path / "again")).ranks == trace.ranks


def test_cut_off_at_every_byte_it_gives_what_was_there(tmp_path: Path) -> None:
    file = write_run(Trace({0: small(0), 1: small(1)}), tmp_path / "run") / "rank0.jsonl"
    whole = file.read_bytes()
    full, _, _ = read_rank_file(file)
    nothing = "rank0.jsonl is ignored: its first line cannot be read"
    counts = []
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        trace = read_run(tmp_path / "run")
        assert trace.ranks[1].complete
        if cut < whole.index(b"\n"):
            assert 0 not in trace.ranks
            assert trace.about["problems"] == [nothing]
            continue
        rank, _, problems = read_rank_file(file)
        for kind in ("steps", "spans", "comms", "memory"):
            kept = getattr(rank, kind)
            assert kept == getattr(full, kind)[: len(kept)]
        counts.append(len(records(rank)))
        ended = cut >= len(whole) - 1  # all but the last newline
        assert rank.complete == trace.ranks[0].complete == trace.complete == ended
        assert len(problems) == (not ended)
        assert trace.size == 2
        if whole[cut - 1 : cut] not in (b"\n", b"]", b"}"):
            line = whole[:cut].count(b"\n") + 1
            assert f"breaks off in line {line}:" in problems[0]
    assert counts == sorted(counts)
    assert set(counts) == set(range(7))


def test_other_files_cut_off_at_every_byte(tmp_path: Path) -> None:
    notes = [{"step": 0, "rank": 0, "loss": 2.5}, {"step": 1, "rank": 0, "loss": float("nan")}]
    write_run(Trace({0: RankTrace(0, 1)}, metrics=notes), tmp_path / "run")
    for name in ("metrics.jsonl", "run.json"):
        file = tmp_path / "run" / name
        whole = file.read_bytes()
        for cut in range(len(whole) + 1):
            file.write_bytes(whole[:cut])
            try:
                trace = read_run(tmp_path / "run")
            except ValueError as error:
                assert name == "run.json" and "its run.json is not JSON" in str(error)
                continue
            assert repr(trace.metrics) == repr(notes[: len(trace.metrics)])
            if len(trace.metrics) < 2 and whole[cut - 1 : cut] not in (b"", b"\n", b"}"):
                assert "metrics.jsonl: line" in trace.about["problems"][0]
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "line",
    [
        b"garbage", b"\xff\xfe", b"[" * 100_000, b"{}", b"[]", b"null", b"12", b'["step"]',
        b'["step",1,0,1.0]', b'["step",1,0,"1.0",2.0,false]', b'["step",1,0,NaN,2.0,false]',
        b'["step","1",0,1.0,2.0,false]', b'["what",1,2]', b'[["step"],1,2]', b'["end",null]',
        b'["memory",1,1.0,0,[1,"2"]]', b'["memory",1,1.0,0,"0:x:1"]', b"",
        b'["span",1,"forward","x",0,1.0,2.0]', b'["step",1,0,1.0,2.0,false,0]',
    ],
)  # fmt: skip
def test_a_damaged_line_is_left_out_and_reported(line: bytes, tmp_path: Path) -> None:
    file = write_run(Trace({0: small()}), tmp_path / "run") / "rank0.jsonl"
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]))
    trace = read_run(tmp_path / "run")
    assert trace.ranks[0].steps == [Step(0, 0.0, 1.0)]  # the second was in that line
    assert len(records(trace.ranks[0])) == 5
    assert not trace.ranks[0].complete
    assert "rank0.jsonl: line 3 cannot be read and is left out" in trace.about["problems"]


@pytest.mark.slow
def test_flipped_bytes_never_crash_it(tmp_path: Path) -> None:
    chance = random.Random(0)
    file = write_run(Trace({0: small(0), 1: small(1)}), tmp_path / "run") / "rank0.jsonl"
    whole = file.read_bytes()
    for _ in range(1500):
        spoilt = bytearray(whole)
        for _ in range(chance.choice([1, 1, 3])):
            spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
        file.write_bytes(bytes(spoilt))
        trace = read_run(tmp_path / "run")
        assert trace.ranks[1].complete


def test_a_lost_line_and_lost_ranks_are_reported(tmp_path: Path) -> None:
    file = write_run(sample_trace(4, steps=1), tmp_path / "run") / "rank0.jsonl"
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join(lines[:5] + lines[7:]))
    (tmp_path / "run" / "rank2.jsonl").unlink()
    (tmp_path / "run" / "rank3.jsonl").rename(tmp_path / "run" / "rank1.jsonl")
    trace = read_run(tmp_path / "run")
    count = len(lines) - 3
    assert sorted(trace.ranks) == [0] and trace.size == 4 and not trace.complete
    assert trace.about["problems"] == [
        f"rank0.jsonl: only {count - 2} of {count} written records are present",
        "rank1.jsonl is ignored: it belongs to rank 3",
        "rank2.jsonl is missing",
        "rank3.jsonl is missing",
    ]


def test_what_a_later_labkit_adds_is_passed_over_and_a_newer_format_refused(tmp_path: Path) -> None:
    write_run(Trace({0: small()}), tmp_path / "run")
    expected = read_run(tmp_path / "run")
    file = tmp_path / "run" / "rank0.jsonl"
    header, *lines = map(json.loads, file.read_text().splitlines())
    header["weather"] = "fine"
    header["columns"]["step"].insert(1, "mood")
    header["columns"]["power"] = ["when_s", "watts"]
    for line in lines:
        if line[0] == "step":
            line.insert(3, "good")
    lines[-1:] = ["power", 6, 1.5, 230], ["end", 7]
    file.write_text("\n".join(map(json.dumps, [header, *lines])))
    add_about(tmp_path / "run", mood="good")
    back = read_run(tmp_path / "run")
    assert back.ranks == expected.ranks and back.ranks[0].complete
    assert back.about["mood"] == "good"
    add_about(tmp_path / "run", format=FORMAT + 1, labkit="9.1")
    raises(r"labkit 9\.1 in a newer format.*pip install -U labkit", read_run, tmp_path / "run")


@cases(
    (None, "has no run.json"), ("{}", "another program wrote"), ("[1]", "another program wrote"),
    ('{"format": "x", "labkit": "1"}', "another program wrote"), ("run", "is not JSON"),
)  # fmt: skip
def test_a_foreign_folder_is_refused_and_kept(text: str | None, words: str, tmp_path: Path) -> None:
    before = {"notes.txt": "notes", "rank0.jsonl": "numbers"}
    if text is not None:
        before["run.json"] = text
    for name, content in before.items():
        (tmp_path / name).write_text(content)
    raises(f"is not a labkit run.*{words}", read_run, tmp_path)
    for allowed in (False, True):
        raises(words, begin_run, tmp_path, replace=allowed)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


def test_a_run_is_replaced_only_on_request_and_the_users_files_stay(tmp_path: Path) -> None:
    write_run(sample_trace(3), tmp_path)
    kept = {"notes.txt", "rank1.jsonl.bak", "rank01.jsonl", "rankings.jsonl"}
    for name in kept:
        (tmp_path / name).write_text("mine")
    raises("already contains a run", write_run, sample_trace(1), tmp_path)
    assert len(read_run(tmp_path).ranks) == 3
    write_run(sample_trace(1), tmp_path, replace=True)
    assert list(read_run(tmp_path).ranks) == [0]
    written = {"metrics.jsonl", "rank0.jsonl", "run.json"}
    assert {file.name for file in tmp_path.iterdir()} == written | kept


def test_no_folder_and_no_folder_but_a_file(tmp_path: Path) -> None:
    raises("nowhere", read_run, tmp_path / "nowhere", error=FileNotFoundError)
    (tmp_path / "file").write_text("mine")
    for function in (read_run, begin_run):
        raises("file", function, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_writing_leaves_the_trace_as_it_was(tmp_path: Path) -> None:
    trace = sample_trace(2)
    trace.about["problems"] = ["of another time"]
    before = copy.deepcopy(trace)
    write_run(trace, tmp_path / "run")
    assert trace == before
    assert "problems" not in read_run(tmp_path / "run").about
