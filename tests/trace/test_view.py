"""`labkit view`: a recorded run as a table, as pictures and as a file for Perfetto."""

import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from matplotlib.figure import Figure
from rich.console import Console

import labkit.plot
from command import command
from labkit import write_run
from labkit.trace import RankTrace, Trace
from labkit.trace.chrome import to_chrome
from labkit.trace.folder import begin_run
from labkit.view import draw, table
from traces import sample_trace


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Pictures without the drawing, which has tests of its own."""
    drawn: list[tuple[str, Any]] = []

    def timeline(trace: Trace, step: int | None = None, **_: Any) -> Figure:
        trace.step(trace.steps()[0] if step is None else step)  # raises where there is none
        drawn.append(("timeline", step))
        return Figure()

    def memory(trace: Trace, **_: Any) -> Figure:
        drawn.append(("memory", trace.steps(detail=True)))
        return Figure()

    monkeypatch.setattr(labkit.plot, "timeline", timeline)
    monkeypatch.setattr(labkit.plot, "memory", memory)
    return drawn


def view(*args: object) -> str:
    return command(" ".join(["view", *map(str, args)]), env={"COLUMNS": "500"})


def shown(trace: Trace) -> dict[str, str]:
    """Left to right side of the table's rows."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(trace))
    rows = [line.split("│")[2:4] for line in console.export_text().splitlines() if "│" in line]
    return {left.strip(): right.strip() for left, right in rows}


def test_view_describes_draws_and_exports(tmp_path: Path, pictures: list[Any]) -> None:
    trace = sample_trace(4)
    run = write_run(trace, tmp_path / "run")
    output = view(run, "--chrome", tmp_path / "trace.json.gz")
    for words in ("DDP of a small GPT", "3, in detail: step 1", "all_reduce", "optimizer state"):
        assert words in output
    assert "damaged" not in output
    page = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert page["traceEvents"] == to_chrome(trace)["traceEvents"]
    assert pictures == [("timeline", None), ("memory", [1])]
    for name in ("timeline.png", "memory.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")
        assert f"Picture:{run / name}" in "".join(output.split())  # long paths wrap


def test_the_numbers_of_the_table() -> None:
    trace = sample_trace(4, steps=4, detail_step=2)
    rows = shown(trace)
    params = 134912  # of the sample's GPT; an all-reduce of S bytes sends 2 (n-1)/n S
    assert rows["all_reduce"] == f"{4 * params * 1.5 / 1e3:.1f} kB per step, in 3 calls"
    assert rows["send"] == "768 bytes per step, in 0.75 calls"
    assert rows["ranks"] == "4" and rows["steps"] == "4, in detail: step 2"
    assert rows["loss"] == "5.5150 -> 4.7650, mean over ranks"
    assert rows["optimizer"] == "0.40 ms, most on rank 3: 0.44 ms"  # it is a tenth slower
    waits = [x.wait_ended_s - x.wait_began_s for x in trace.ranks[0].comms if x.step == 1]
    assert re.fullmatch(r"[\d.]+ ms, most on rank \d: [\d.]+ ms", rows["waiting"])
    assert float(rows["waiting"].split()[0]) == pytest.approx(sum(waits) * 1e3, rel=0.1)
    held = max(sum(p.held_bytes) for one in trace.ranks.values() for p in one.memory)
    assert rows["total"] == f"{held / 1e6:.1f} MB, on rank 0 in step 2"
    assert rows["parameters"] == f"{4 * params / 1e3:.1f} kB"


def test_times_of_a_detailed_step_do_not_count_nor_waiting_as_computing() -> None:
    rows, without = (shown(sample_trace(2, steps=3, detail_step=step)) for step in (1, None))
    for name in ("forward", "backward", "optimizer"):
        assert rows[name] == without[name]
    assert "total" not in without
    only = shown(sample_trace(2, steps=1, detail_step=0))
    assert "forward" not in only and "total" in only
    alone = sample_trace(4, steps=1, detail_step=None)
    backward = next(x for x in alone.ranks[0].spans if x.phase == "backward" and x.depth == 0)
    whole_ms = (backward.ended_s - backward.began_s) * 1e3
    assert float(shown(alone)["backward"].split()[0]) < whole_ms - 1


def test_a_damaged_run_is_shown_with_its_problems(tmp_path: Path, pictures: list[Any]) -> None:
    run = write_run(sample_trace(3), tmp_path / "run")
    (run / "rank2.jsonl").unlink()
    whole = (run / "rank1.jsonl").read_bytes()
    (run / "rank1.jsonl").write_bytes(whole[: len(whole) // 2])
    output = view(run)
    for words in ("3, 1 missing", "rank1.jsonl breaks off in line", "rank2.jsonl is missing"):
        assert words in output
    assert output.count("damaged: ") == len(pictures) == 2


@pytest.mark.parametrize(
    "trace", [Trace({0: RankTrace(0, 1)}), Trace({1: RankTrace(1, 2, complete=False)}), None]
)
def test_an_empty_run_is_viewed(trace: Trace | None, tmp_path: Path, pictures: list[Any]) -> None:
    view(write_run(trace, tmp_path / "run") if trace else begin_run(tmp_path / "run"))
    assert pictures == []


def test_communication_without_steps_is_listed_by_rank() -> None:
    trace = sample_trace(2, steps=2)
    for rank in trace.ranks.values():
        rank.steps, rank.spans, rank.memory = [], [], []
    assert shown(trace)["all_reduce"] == "1.1 MB, in 6 calls"


def test_open_shows_the_pictures(
    tmp_path: Path, pictures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(typer, "launch", opened.append)
    run = write_run(sample_trace(2, detail_step=None), tmp_path / "run")
    view(run)
    assert opened == []
    view(run, "--open", "--step", "2")
    assert opened == [str(run / "timeline.png")]
    assert pictures[-1] == ("timeline", 2)


def test_the_real_pictures(tmp_path: Path) -> None:
    for picture in draw(sample_trace(2), tmp_path):
        assert len(picture.read_bytes()) > 10_000
    assert {f.name for f in tmp_path.iterdir()} == {"timeline.png", "memory.png"}
