"""Foreign run folders and files are read, or refused in one sentence; nothing else is written."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from command import command, python
from damage import SECRET, damage
from labkit import Link, World, cluster, plot, read_run, record, write_clusters, write_run
from labkit.sweeps.sweep import Sweep
from labkit.trace.chrome import to_chrome, write_chrome
from labkit.trace.nccl_log import parse_nccl_log
from labkit.training import Task, train
from places import ROOT
from sweep_cases import points_of
from tables import cases, raises
from traces import sample_trace

EVIL = "\x1b]0;title\x07\x1b[31m[/x][nope]"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of two ranks, over a paced link, with a step in detail."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    predicted = {"parameter_bytes": 1, "gradient_bytes": 2, "optimizer_bytes": 3}
    with World(2, link=Link(gbps=1)) as world, record(folder, 1, what="ddp", predicted=predicted):
        world.run(train, "ddp", Task(model="tiny", steps=3, rows=4, length=16))
    assert read_run(folder).complete
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(sample_trace(2), tmp_path / "run")


def change_header(file: Path, **changes: Any) -> None:
    header, *lines = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps(json.loads(header) | changes), *lines]))


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_lines(file: Path, **changes: Any) -> int:
    """Write other values into the comm events of a rank file; how many there are."""
    header, *lines = (json.loads(line) for line in file.read_text().splitlines())
    events = [line for line in lines if line[0] == "comm"]
    for line in events:
        for name, value in changes.items():
            line[2 + header["columns"]["comm"].index(name)] = value
    file.write_text("\n".join(map(json.dumps, [header, *lines])) + "\n")
    return len(events)


def fuzz(*args: object) -> dict[str, Any]:
    done = python(ROOT / "tests/support/damage.py", *args, timeout=1500)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == []
    assert found["peak_mb"] < 2000
    return found


def test_a_range_of_ranks_is_bounded_and_its_line_is_left_out(folder: Path) -> None:
    assert change_lines(folder / "rank0.jsonl", ranks="0:1000000000000:1") > 1
    trace = read_run(folder)
    assert trace.ranks[0].comms == [] and trace.ranks[1].comms
    assert any("rank0.jsonl: line" in x and "left out" in x for x in trace.about["problems"])


def test_ranges_of_ranks_are_bounded_together_and_equal_ranges_shared(folder: Path) -> None:
    file = folder / "rank0.jsonl"
    change_lines(file, ranks="0:1000:1")
    events = read_run(folder).ranks[0].comms
    assert len(events) > 1 and all(x.ranks is events[0].ranks for x in events)
    assert events[0].ranks == tuple(range(1000))
    header, *lines = file.read_text().splitlines()
    event = next(json.loads(line) for line in lines if '"comm"' in line[:8])
    place = 2 + json.loads(header)["columns"]["comm"].index("ranks")
    many = []
    for number in range(200):
        event[1], event[place] = number, f"{number}:{number + 100_000}:1"
        many.append(json.dumps(event))
    file.write_text("\n".join([header, *many]))
    kept = read_run(folder).ranks[0].comms
    assert 0 < len(kept) < 20 and len(kept[0].ranks) == 100_000


@cases(("rank0.jsonl", 2), ("run.json", 0))
def test_a_million_million_ranks_are_not_believed(name: str, size: int, folder: Path) -> None:
    change_header(folder / "rank0.jsonl", size=10**12)
    if name == "run.json":
        change_json(folder / name, world_size=10**12)
        for file in folder.glob("rank*.jsonl"):
            file.unlink()
    trace = read_run(folder)
    assert trace.size == size
    assert any(name in problem for problem in trace.about["problems"])


def test_missing_ranks_are_counted_and_not_all_listed(tmp_path: Path) -> None:
    folder = write_run(sample_trace(1), tmp_path / "run")
    change_header(folder / "rank0.jsonl", size=1024)
    problems = read_run(folder).about["problems"]
    assert len(problems) == 9 and problems[-1] == "1,015 more ranks have no file"


@cases(
    ("timeline.png", "view {0}"),
    ("memory.png", "view {0}"),
    ("chrome.json.gz", "view {0} --chrome {0}/chrome.json.gz"),
    ("replay-selene.png", "replay {0} --on selene --measured"),
    ("chrome.json", "replay {0} --on selene --measured --chrome {0}/chrome.json"),
)
def test_no_link_is_written_through(name: str, line: str, folder: Path, tmp_path: Path) -> None:
    (outside := tmp_path / "outside").write_text(SECRET)
    (folder / name).symlink_to(outside)
    assert "is a link" in command(line.format(folder), 2)
    assert outside.read_text() == SECRET


def test_a_cluster_named_as_a_path_draws_into_the_runs_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "replay-..").mkdir()
    custom = replace(cluster("h200-node"), name="../../../up", title="[/x]\x1b[31m")
    write_clusters(tmp_path / "custom.toml", {custom.name: custom})
    shown = command(f"replay {folder} --clusters {tmp_path}/custom.toml --measured")
    assert (folder / "replay-..-..-..-up.png").is_file() and "\x1b" not in shown
    assert {x.name for x in tmp_path.iterdir()} == {"run", "custom.toml"}


def test_names_and_texts_of_a_run_reach_the_terminal_as_plain_text(tmp_path: Path) -> None:
    trace = sample_trace(2)
    trace.about |= {"what": EVIL, "seed": [EVIL]}
    for one in trace.ranks.values():
        one.host = one.device = EVIL
        for event in one.comms:
            event.op = event.group = EVIL
    folder = write_run(trace, tmp_path / f"run[nope]{chr(27)}[31m")
    change_json(folder / "run.json", command="\ud800\u202e")
    change_lines(folder / "rank1.jsonl", rank=-1)
    args = ("-m", "labkit", "view", folder, "--chrome", tmp_path / "chrome.json")
    shown = python(*args, timeout=300).stdout
    assert not set(shown) & {"\x1b", "\x07", "\ud800", "\u202e"}
    assert "\\x1b]0;title\\x07\\x1b[31m[/x][nope]" in shown and "\\ud800\\u202e" in shown
    assert (folder / "timeline.png").stat().st_size > 1000


def test_formulas_in_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    trace = sample_trace(2)
    for rank in trace.ranks.values():
        for event in rank.comms:
            event.op, event.group = "$\\frac{$", " "
    trace.about["replayed"] = "$\\frac{$"
    folder = write_run(trace, tmp_path / "run")
    command(f"view {folder}")
    assert (folder / "timeline.png").stat().st_size > 1000


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "loop": lambda file: file.symlink_to(file),
}


@pytest.mark.parametrize("what", IRREGULAR)
@pytest.mark.parametrize("name", ["run.json", "rank0.jsonl", "metrics.jsonl"])
def test_an_irregular_file_is_named_and_does_not_block(name: str, what: str, folder: Path) -> None:
    (file := folder / name).unlink()
    IRREGULAR[what](file)
    if name == "run.json":
        raises("run.json", read_run, folder, error=(ValueError, OSError))
        command(f"view {folder}", 2)
    else:
        trace = read_run(folder)
        assert any(name in problem for problem in trace.about["problems"])
        assert 1 in trace.ranks and trace.complete == (name == "metrics.jsonl")


def test_a_file_of_a_terabyte_is_not_read(folder: Path) -> None:
    with (folder / "rank0.jsonl").open("r+b") as file:
        file.truncate(1 << 40)
    trace = read_run(folder)
    assert 0 not in trace.ranks and trace.ranks[1].complete
    assert any("1,099,511,627,776 bytes" in problem for problem in trace.about["problems"])


@pytest.mark.parametrize(
    "note",
    [{"step": "x"}, {"step": [1]}, {"step": {}}, {"step": None}, {"step": float("nan")},
     {"loss": "2.5"}, {"loss": []}, {"loss": 10**400}, {"loss": True}, {"rank": "x"}],
)  # fmt: skip
def test_a_non_numeric_loss_or_step_is_left_out(note: dict[str, Any], tmp_path: Path) -> None:
    folder = write_run(sample_trace(1), tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | note)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    trace = read_run(folder)
    assert trace.about["problems"] == ["metrics.jsonl: line 2 cannot be read and is left out"]
    assert len(trace.metrics) == len(lines) - 1
    assert "5.5000 -> 5.0000" in command(f"view {folder}")
    command(f"replay {folder} --on selene --measured")


@cases(([float("inf"), float("-inf")], "nan"), ([1e308, 1e308], "inf"))
def test_a_diverged_loss_is_shown(losses: list[float], mean: str, tmp_path: Path) -> None:
    trace = sample_trace(2)
    trace.metrics = [{"step": 0, "rank": rank, "loss": loss} for rank, loss in enumerate(losses)]
    assert mean in command(f"view {write_run(trace, tmp_path / 'run')}")


@pytest.mark.parametrize("time_s", [1e300, -1e300, 5e9, 10**400, True, "1"])
def test_a_time_that_no_clock_shows_is_left_out(time_s: Any, folder: Path, tmp_path: Path) -> None:
    assert change_lines(folder / "rank0.jsonl", ended_s=time_s)
    trace = read_run(folder)
    assert trace.ranks[0].comms == [] and trace.ranks[0].spans
    write_chrome(trace, tmp_path / "chrome.json")
    change_header(folder / "rank1.jsonl", clock={"monotonic_s": 0.0, "unix_s": time_s})
    assert 1 not in read_run(folder).ranks


@pytest.mark.parametrize(
    "changes",
    [{"rank": 2}, {"rank": -1}, {"peer": 9}, {"peer": None}, {"ranks": []},
     {"payload_bytes": 2**61}, {"payload_bytes": True}, {"seq": 10**400}],
)  # fmt: skip
def test_an_event_that_cannot_have_been_is_left_out(changes: dict[str, Any], folder: Path) -> None:
    assert change_lines(folder / "rank0.jsonl", op="send", **changes)
    trace = read_run(folder)
    assert trace.ranks[0].comms == []
    assert to_chrome(trace)["traceEvents"]


def test_an_event_of_a_group_that_its_rank_is_not_in_is_exported(folder: Path) -> None:
    change_lines(folder / "rank0.jsonl", ranks=[5, 6])
    events = to_chrome(read_run(folder))["traceEvents"]
    assert sum(x.get("cat") == "communication" for x in events) > 2


def test_notes_in_run_json_that_cannot_be_computed_with_are_left_out(recorded: Path) -> None:
    trace, file = read_run(recorded), recorded / "run.json"
    assert "problems" not in trace.about and trace.about["link"] == {"gbps": 1, "latency_us": 0.0}
    assert all(one.comms and one.operations and one.memory for one in trace.ranks.values())
    whole = file.read_text()
    for name, value in (
        ("link", {"gbps": "fast"}), ("link", 5), ("link", {"inside": {"gbps": 1}}), ("link", {}),
        ("predicted", {"parameter_bytes": "x"}), ("world_size", 2.5),
    ):  # fmt: skip
        change_json(file, **{name: value, "problems": 7})
        trace = read_run(recorded)
        assert trace.about["problems"] == [f"run.json: {name} cannot be read and is left out"]
        assert name not in trace.about and len(trace.ranks) == 2
        file.write_text(whole)


@pytest.mark.timeout(600)
@cases((5000, 30), pytest.param(0, 1000, marks=pytest.mark.slow))
def test_damaged_runs_are_read_or_refused(first: int, count: int, recorded: Path) -> None:
    counts = fuzz("runs", recorded, first, count, 20)["counts"]
    assert counts["read"] + counts["read refused"] == count
    assert counts["read"] > 20 and counts["read refused"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damaged_runs_on_the_real_command_line(recorded: Path, tmp_path: Path) -> None:
    for seed in range(7000, 7008):
        chance, folder = Random(seed), tmp_path / f"run{seed}"
        shutil.copytree(recorded, folder)
        (outside := tmp_path / "outside").write_text(SECRET)
        damage(chance.choice(sorted(folder.iterdir())), outside, chance)
        (folder / "memory.png").symlink_to(outside)
        view = f"view {folder} --chrome {tmp_path}/chrome.json"
        for line in (view, f"replay {folder} --on dgx-h100 --measured"):
            done = python("-m", "labkit", *line.split(), status=None, timeout=300)
            assert done.returncode in (0, 2), (seed, done.stdout, done.stderr)
            assert "Traceback" not in done.stdout + done.stderr and "\x1b" not in done.stdout
            assert done.returncode == 0 or "labkit: " in done.stdout
        assert outside.read_text() == SECRET


@pytest.mark.timeout(600)
@cases((0, 8), pytest.param(1000, 517, marks=pytest.mark.slow))
def test_damaged_files_are_read_or_refused(first: int, count: int, tmp_path: Path) -> None:
    points = points_of("all_reduce", 2, "default", {4096: 1e-4})
    points += points_of("all_reduce", 2, "ring", {4096: 1e-4})
    points += points_of("all_reduce", 2, "gloo", {4096: 1e-4}, own=True)
    sweep = Sweep(points, {"backend": "gloo", "time": "median"}).save(tmp_path / "sweep.json")
    counts = fuzz("files", sweep, first, count)["counts"]
    for what in ("clusters", "log", "table", "sweep"):
        assert counts.get(what, 0) + counts.get(f"{what} refused", 0) == count


def test_a_log_that_claims_a_million_million_ranks_is_not_believed(tmp_path: Path) -> None:
    text = (ROOT / "labkit/trace/nccl_log/examples/one_node.log").read_text()
    (tmp_path / "nccl.log").write_text(re.sub("(n[rR]anks) [48]", rf"\1 {10**12}", text))
    args = ("-m", "labkit", "nccl-log", "nccl.log")
    done = python(*args, status=None, timeout=300, cwd=tmp_path)
    assert done.returncode in (0, 2) and "Traceback" not in done.stderr


@pytest.mark.parametrize("trees", ["1/-1/-1->0->1", "0/-1/-1->0->-1", "0/0/1->0->-1"])
def test_a_tree_that_leads_back_to_itself_is_drawn(trees: str) -> None:
    log = parse_nccl_log(
        "n:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1 commId 0x2 - Init START\n"
        f"n:1:1 [0] NCCL INFO Trees [0] {trees} [0] 0/-1/-1->1->0\n"
    )
    assert log.main.trees
    assert plot.nccl(log).axes
