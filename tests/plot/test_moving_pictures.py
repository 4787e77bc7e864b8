"""The bench of transfers and its pictures, with given times: saved, read again, and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from torch import nn

from command import command
from labkit import Bus, Waiting, load_then_run, plot, run_in_place, run_pipelined
from labkit.bench import show_stored, transfers
from labkit.bench.harness import StepTimes, save
from labkit.bench.stored import RESULTS
from labkit.bench.transfers import TransferTimes, bench_transfers, read_transfers
from labkit.memory.timing import Measured
from labkit.memory.transfers import Transfer, ways
from labkit.plot.style import OTHER_OPERATIONS
from tables import raises

ABOUT = {"device": "a device", "torch": "2.11", "date": "2026-01-01", "paced_gbps": 16.0}


@pytest.fixture
def found() -> TransferTimes:
    """Every way of this machine with a paced bus, each a millisecond slower than the one before."""
    measured = [
        Measured(x, 1000, (2 + i) * 1e-3, (1 + i) * 1e-3) for i, x in enumerate(ways(Bus()))
    ]
    return TransferTimes(dict(ABOUT), measured)


def test_saved_and_shipped_results_are_read_again(found: TransferTimes, tmp_path: Path) -> None:
    path = found.save(tmp_path / "folder" / "transfers-here.json")
    assert read_transfers(path) == found
    for path in RESULTS.glob("transfers-*.json"):
        stored = read_transfers(path)
        assert {"device", "torch", "date", "turns"} <= stored.about.keys() and stored.measured


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"measured": [{"done_s": 1}]}'])
def test_another_file_is_refused(text: str, tmp_path: Path):
    (tmp_path / "other.json").write_text(text)
    raises("was not saved by `labkit bench transfers`", read_transfers, tmp_path / "other.json")


def test_a_table_has_a_row_for_each_way(found: TransferTimes):
    shown = transfers.table(found)
    assert shown.row_count == len(found.measured)
    assert "a device, torch 2.11, 2026-01-01" in str(shown.title)
    assert "16 Gbit/s, modeled" in str(shown.caption)


def test_the_fastest_of_each_ends_and_dtypes():
    slow, fast = (
        Measured(Transfer("cpu", "cpu", torch.float32, torch.float16, cast), 10, done_s, done_s)
        for cast, done_s in (("before", 2.0), ("after", 1.0))
    )
    other = Measured(Transfer("cpu", "cpu"), 10, 3.0, 3.0)
    assert transfers.fastest_of([slow, fast, other]) == [fast, other]


@pytest.mark.parametrize("options", [{"mb": 0}, {"turns": 0}, {"gbps": -1}, {"to": "fp32"}])
def test_a_bench_of_nothing_is_refused(options: dict[str, float]):
    raises("", bench_transfers, **options)


def test_the_command_measures_saves_and_draws(tmp_path: Path):
    saved, picture = tmp_path / "found.json", tmp_path / "found.png"
    command(f"bench transfers --mb 0.1 --turns 3 --gbps 1 --save {saved} --plot {picture}")
    measured = json.loads(saved.read_text())
    assert measured["numel"] == 25_000 and measured["about"]["paced_gbps"] == 1.0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_what_was_measured_and_the_limit_of_the_bus(found: TransferTimes):
    raises("measure at least one transfer", plot.transfers, [])
    over_bus = [one for one in found.measured if one.way.ends == ("cpu", "paced")]
    axes = plot.transfers(over_bus, found.rates).axes[0]
    widths = {round(bar.get_width(), 6) for bar in axes.patches}  # type: ignore[attr-defined]
    assert {round(one.done_s * 1e3, 6) for one in over_bus} <= widths
    bus_s = {r[1]: x for r, x in found.rates.bytes_per_s.items() if r[0] == "bus"}["cpu → paced"]
    limits = {round(line.get_xdata()[0], 6) for line in axes.lines if len(line.get_xdata()) == 2}
    assert limits == {round(nbytes / bus_s * 1e3, 6) for nbytes in (2000, 4000)}
    assert len(axes.get_yticklabels()) == len(over_bus) == 12


def test_the_picture_of_loads_has_two_lanes_for_each_run_and_one_colour_for_the_bus() -> None:
    raises("pass runs by name", plot.loading, {})
    waiting, x = Waiting([nn.Linear(4, 4) for _ in range(3)], Bus(gbps=0.1)), torch.ones(4)
    ways_to_run = (load_then_run, run_pipelined, run_in_place)
    (axes,) = plot.loading({way.__name__: way(waiting, x) for way in ways_to_run}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bus", "compute"] * 3
    texts = [text.get_text() for text in axes.texts]
    assert any("holds 0 MB" in text for text in texts) and "run_pipelined" in texts
    assert "paced to 0.1 Gbit/s" in axes.get_title(loc="left")
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    on_bus = {bar.get_facecolor() for bar in bars if bar.get_y() % 3 < 1.3}
    assert on_bus and on_bus <= set(map(to_rgba, OTHER_OPERATIONS)), "two shades of brown"


def test_stored_figures_are_drawn_or_a_sentence_says_that_there_are_none(
    found: TransferTimes, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    for what in ("precision", "transfers"):
        show_stored(what, tmp_path)
        assert f"`labkit bench {what}` measures this one" in capsys.readouterr().out
    found.save(tmp_path / "transfers-there.json")
    steps = {"fp32": [2.0, 2.0], "bf16": [1.0, 1.0]}
    peaks = {"peak_bytes": dict.fromkeys(steps, 10**6)}
    about = {"model": "a model", "device": "a GPU", "torch": "2.11.0", "date": "2026-11-26"}
    times = StepTimes(about, steps, figures=peaks)
    save([times], tmp_path / "precision-there.json")
    for what in ("precision", "transfers"):
        show_stored(what, tmp_path)
    milliseconds = shown[0].axes[0]
    assert [label.get_text() for label in milliseconds.get_yticklabels()] == ["bf16", "fp32"]
    assert [bar.get_width() for bar in milliseconds.patches] == [1000, 2000]
    assert shown[0].get_suptitle() == "a model, measured on a GPU, torch 2.11.0, 2026-11-26"
    assert len(shown) == 2 and capsys.readouterr().out == ""
    raises("choose one of precision, transfers", show_stored, "speed")
