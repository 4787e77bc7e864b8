"""The commands as a user types them: what they print, write, refuse and exit with."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.measure import Measurement
from typer.testing import CliRunner

from command import command, python
from labkit import DDP, GPT, compare, doctor, dry_run, read_run, recipes, write_run
from labkit.bench import machine
from labkit.cli import app
from labkit.clusters import Cluster, cluster, known_clusters, read_clusters, write_clusters
from labkit.holdings import Footprint, parameter_bytes
from labkit.trace import Trace
from labkit.training import Task, train
from laws import broken_laws
from tables import cases

P_BYTES = parameter_bytes(GPT.preset("tiny", vocab=1024, context=64).double())
OTHERS = """
[clusters.mine]
device = "v100"
nodes = 1
levels = [{devices = 1, ports = 1, bytes_per_s = [1e9, "a guess"], latency_s = [0, "a guess"]}]
"""
TINY = "--model tiny --steps 4 --rows 5"


@pytest.mark.slow
def test_compare_proves_equality_and_draws(tmp_path: Path) -> None:
    line = f"labkit compare --all {TINY} --ranks 3 --out made"
    done = python("-m", *line.split(), cwd=tmp_path)
    assert "All equal" in done.stdout
    own = [f"{name}/{what}.png" for name in ("single", "ddp") for what in ("timeline", "memory")]
    for name in ("compare.png", "steps.png", *own):
        picture = (tmp_path / "made" / name).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    for name in ("single", "naive-ddp", "ddp"):
        assert re.search(rf"{name} .*✓", done.stdout)
        trace = read_run(tmp_path / "made" / name)
        assert trace.complete and broken_laws(trace) == []
        assert trace.about["predicted"]["bus_bytes"] == (0 if name == "single" else 4 / 3 * P_BYTES)
    assert "Warning" not in done.stderr
    assert "tensor is skipped: 4 heads cannot be split evenly over 3 ranks" in done.stdout


def test_compare_takes_one_of_each_family_or_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a family whose last does not fit, the one before it."""
    monkeypatch.setattr(compare, "World", lambda ranks: nullcontext(SimpleNamespace(picked="")))
    monkeypatch.setattr(compare, "_recorded", lambda world, name, *_: ([name], None))
    monkeypatch.setattr(compare, "_judge", lambda reports, *_: reports[0])
    every, task = list(recipes.RECIPES), Task(rows=8)
    last = ["single", "ddp", "zero-3", "sequence", "context", "pipeline", "three-d"]
    assert compare.compare(task, out=tmp_path) == last
    assert compare.compare(task, every=True, out=tmp_path) == every
    assert compare.compare(task, ["naive-ddp"], out=tmp_path) == ["single", "naive-ddp"]
    unfit = replace(recipes.RECIPES["sequence"], unfit=lambda *_: "too short")
    monkeypatch.setitem(recipes.RECIPES, "sequence", unfit)
    assert compare.compare(task, out=tmp_path) == [x.replace("sequence", "tensor") for x in last]


@pytest.mark.slow
@cases(
    ("tensor sequence context pipeline", f"{TINY} --ranks 2"),
    ("three-d", "--model tiny --steps 3 --rows 8 --ranks 4"),  # two stages of two
    ("three-d", "--model tiny --steps 3 --rows 8 --ranks 8"),  # and replicas
)
def test_compare_holds_weights_bytes_sent_and_bytes_held(
    names: str, options: str, tmp_path: Path
) -> None:
    line = f"compare {names} {options} --out {tmp_path}"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0 and "All equal" in done.output, done.output
    assert all(re.search(rf"^{name} .*✓", done.output, re.MULTILINE) for name in names.split())


def test_a_pipeline_is_predicted_stage_by_stage() -> None:
    """Parameters once, and the tied embedding twice; b s h there and back over each boundary."""
    model = GPT.preset("tiny", vocab=64, context=16).double()
    embed_bytes, nbytes = 64 * 12 * 8, parameter_bytes(model)
    footprint = recipes.RECIPES["pipeline"].footprint
    whole = footprint(model, 2, 5 * 16)
    assert whole.parameter_bytes == whole.gradient_bytes == (nbytes + embed_bytes) / 2
    assert whole.bus_bytes == (2 * 5 * 16 * 12 * 8 + 2 * embed_bytes) / 2
    untied = GPT.preset("tiny", vocab=64, context=16, tied=False).double()
    assert footprint(untied, 2, 80).bus_bytes == 80 * 12 * 8
    assert footprint(model, 1, 80).bus_bytes == 0


def test_schedule_prints_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "one.png"
    line = f"schedule 1f1b --stages 2 --microbatches 2 --plot {picture}"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.output
    assert "stage 0  F0 F1 .. B0 .. B1\nstage 1  .. F0 B0 F1 B1\n" in done.output
    assert "A step takes the time of 9 forwards; its bubble is 33.3%" in done.output
    assert "per stage: 2, 1." in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = command("schedule interleaved")
    assert "F0.1" in shown and "its bubble is 15.8%" in shown and "5.5, 4.5, 3.5, 2.5" in shown


@pytest.mark.slow
def test_compare_in_float32_and_with_the_users_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    line = f"compare ddp {TINY} --dtype float32 --text notes.txt --ranks 2"
    assert "naive" not in command(line)


class HalfSent(DDP):
    """A fault: gradients are averaged, then halved."""

    def _finish(self) -> None:
        super()._finish()
        for bucket in self._buckets:
            bucket.flat.mul_(0.5)


@pytest.mark.slow
def test_the_table_of_compare_fits_80_columns_with_every_strategy_and_large_numbers() -> None:
    held = Footprint(98.7e6, 98.7e6, 987.6e6, 987.65e6)
    results = [
        compare.Result(name, 64, [9.8765], 1e-13, held, held, 9.876, ["wrong"], Trace())
        for name in recipes.RECIPES
    ]
    shown = compare.table(results, Task())
    wide = Console(width=500)
    assert Measurement.get(wide, wide.options, shown).maximum <= 80


@pytest.mark.slow
def test_compare_finds_a_faulty_strategy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train_with_fault(name: str, task: Task) -> object:
        if name == "ddp":
            recipes.RECIPES["ddp"] = recipes.Recipe("ddp", "data parallel", HalfSent, DDP.predict)
        return train(name, task)

    monkeypatch.setattr(compare, "train", train_with_fault)
    shown = command(f"compare ddp --ranks 2 {TINY} --out {tmp_path}", 1)
    assert "weights differ from single-process training" in shown


def test_wrong_bytes_wrong_memory_and_a_nan_anywhere_are_reported(worlds: Any) -> None:
    task = Task(model="tiny", steps=2, rows=2)
    report = worlds(1).run(train, "single", task)[0]

    def problems(**changes: Any) -> list[str]:
        return compare._judge([replace(report, **changes)], report, task, Trace()).problems

    wrong = Footprint(1, 2, 3, 4)
    assert [text.split(":")[0] for text in problems(predicted=wrong)] == list(vars(wrong))
    for name in (next(iter(report.weights)), list(report.weights)[-1]):
        weights = report.weights | {name: torch.full_like(report.weights[name], torch.nan)}
        assert "weights differ" in "; ".join(problems(weights=weights))
    assert "losses differ" in "; ".join(problems(losses=[report.losses[0], float("nan")]))


@pytest.mark.slow
def test_a_run_is_recorded_and_viewed_under_torchrun_and_in_a_world_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun, losses = "torch.distributed.run --nproc-per-node 2 -m ", set()
    for name, launcher, ranks in (("world", "", "--ranks 2"), ("torchrun", torchrun, "")):
        (folder := tmp_path / name).mkdir()
        line = f"{launcher}labkit run ddp {TINY} {ranks} --record mine"
        done = python("-m", *line.split(), cwd=folder)
        losses |= set(re.findall(r"loss [\d.]+ -> [\d.]+", done.stdout))
        assert done.stdout.count("ddp on 2 ranks") == 1, "rank 0 speaks for both"
        trace = read_run(folder / "mine")
        assert trace.complete and sorted(trace.ranks) == [0, 1] and broken_laws(trace) == []
        assert trace.steps(detail=True) and len(trace.metrics) == 2 * len(trace.steps())
        monkeypatch.chdir(folder)
        assert "all_reduce" in command("view mine --chrome trace.json")
        for file in ("mine/timeline.png", "mine/memory.png", "trace.json"):
            assert (folder / file).stat().st_size > 1000
    assert len(losses) == 1


def test_doctor_sees_the_machine_and_two_ranks_that_talk() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    for words in ("torch", "cores", "memory", "World(4)", "all-reduce of 16 MiB"):
        assert words in done.output
    assert done.exit_code == (1 if "problem:" in done.output else 0)


def test_doctor_in_a_job_says_which_rank_this_is_and_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (by_hand | {"SLURM_JOB_ID": "7", "LABKIT_DEVICE": "cpu"}).items():
        monkeypatch.setenv(name, value)
    report = doctor.Findings()
    doctor._job(report)
    job = dict(report.groups["job"])
    assert job["torchrun"] == "rank 1 of 2; rank 0 listens at 127.0.0.1:29500"
    assert job["interface to rank 0"] == "lo (127.0.0.1)" and job["LABKIT_DEVICE"] == "cpu"
    assert job["Slurm"] == "job 7 on unknown nodes" and report.problems == []
    monkeypatch.delenv("MASTER_ADDR")
    doctor._job(report)
    assert "MASTER_ADDR is not set" in report.problems[0]


def test_doctor_writes_what_it_measured_as_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measured(ranks: int) -> Cluster:
        asked.append(ranks)
        return replace(cluster("workstation"), name="here", title=f"{ranks} ranks")

    monkeypatch.setattr(machine, "measure_machine", measured)
    path = tmp_path / "laptop.toml"
    for options, ranks in ("", 4), ("--ranks 2", 2):  # the second over the first
        said = command(f"doctor --cluster {path} {options}")
        assert "82600.0 GFLOP/s" in said and "31.50 GB/s" in said and "30.0 us" in said
        assert 'read_clusters("' in said and 'laptop.toml")["here"]' in said.replace(" ", "")
        assert read_clusters(path) == {"here": measured(ranks)}
    assert asked == [4, 4, 2, 2]


@cases(
    ("notes.toml", "hello", "is not a cluster file"),
    ("notes.toml", "[devices.x]", "is not a cluster file"),
    ("mine.toml", OTHERS, "other clusters (mine) that would be lost"),
)
def test_doctor_writes_over_nothing_of_ones_own(
    name: str, text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    monkeypatch.setattr(machine, "measure_machine", lambda ranks: pytest.fail("measured"))
    assert words in command(f"doctor --cluster {name}", 2)
    assert Path(name).read_text() == text


COMMANDS = [  # in the order of their use
    "compare", "run", "doctor", "view", "gather", "replay", "schedule", "nccl-log", "plan", "bench",
]  # fmt: skip


@pytest.mark.parametrize("name", [*COMMANDS, "bench collectives"])
def test_every_command_has_help_with_an_example(name: str) -> None:
    examples = "NCCL_DEBUG" if name == "nccl-log" else f"labkit {name}"
    assert f"Examples: {examples}" in command(f"{name} --help")


def test_the_help_lists_the_commands_in_the_order_of_their_use() -> None:
    lines = CliRunner().invoke(app, ["--help"]).output.splitlines()
    assert [x[1] for line in lines if (x := re.match(r"│ ([a-z][a-z-]*)  ", line))] == COMMANDS


@cases(
    ("bench collectives", ["Smallest size in bytes", "2,3,4 with --fit"]),
    ("plan", ["Rows per micro-batch; default: powers of two",
              "Chunks per stage; default: powers of two", "GB (1e9 bytes)",
              "memory by category", "Recompute blocks in backward", "for --cluster",
              "Tokens per row"]),
    ("replay", ["Keep measured compute times; take only the links", "of one cluster for Perfetto",
                "--cluster` writes"]),
    ("doctor", ["the number of ranks; default: 4"]),
    ("schedule", ["Chunks of the model per stage", "over time, as a PNG file"]),
    ("bench transfers", ["Gigabits per second"]),
)  # fmt: skip
def test_the_help_of_an_option_says_what_it_counts_and_in_which_unit(
    command: str, words: list[str]
) -> None:
    wide = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}
    text = CliRunner().invoke(app, [*command.split(), "--help"], env=wide).output
    text = " ".join(text.replace("│", " ").split())
    assert [part for part in words if part not in text] == []


def test_a_run_is_replayed_on_clusters(tmp_path: Path) -> None:
    trace = dry_run(two_steps, ranks=2)
    run = write_run(trace, tmp_path / "run")
    own = tmp_path / "mine.toml"
    write_clusters(own, {"mine": replace(cluster("selene"), name="mine", nodes=1)})
    chrome = tmp_path / "replay.json"
    shown = command(f"replay {run} --clusters {own} --on mine --chrome {chrome}")
    assert "mine" in shown and (run / "replay-mine.png").exists()
    events = json.loads(chrome.read_text())["traceEvents"]
    assert any("all_reduce" in event["name"] for event in events)
    shown = command(f"replay {run}")
    assert [name for name in known_clusters() if name not in shown] == []
    assert len(list(run.glob("replay-*.png"))) == 1 + len(known_clusters())
    assert "no step of this trace was timed" in command(f"replay {run} --measured", 2)


def two_steps() -> None:
    model = DDP(GPT.preset("tiny"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        optimizer.step()
