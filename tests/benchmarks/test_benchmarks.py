"""The maintainers' benchmarks measure what they show. No test asserts a time."""

import pytest
import typer
from typer.testing import CliRunner

import at_scale
import communicator_overhead
import recording_overhead
import timeline_redraw
import world_startup


@pytest.mark.slow
def test_calls_are_timed_with_and_without_recording() -> None:
    times = communicator_overhead.measure()
    assert 0 < times.plain_us < times.recorded_us
    assert communicator_overhead.table(times).row_count == 5


@pytest.mark.slow
def test_recording_is_timed_on_the_same_steps() -> None:
    case = recording_overhead.Case("tiny", ranks=2, rows=3, dtype="float64")
    (overhead,) = recording_overhead.measure((case,), turns=3)
    assert overhead.case == case and min(*overhead.plain, *overhead.recorded) > 0
    assert overhead.ratio == overhead.recorded.wall_s / overhead.plain.wall_s
    assert recording_overhead.table([overhead]).row_count == 1


@pytest.mark.slow
def test_the_start_of_worlds_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_startup, "SIZE", 2)  # each spawned rank imports torch
    times = world_startup.measure(tries=1)
    assert 0 < times.empty_run_s < times.warm_s < times.spawn_s
    assert world_startup.table(times).row_count == 4


@pytest.mark.slow
def test_redraws_of_steps_and_of_replays_are_timed() -> None:
    times = timeline_redraw.measure(ranks=2, turns=2)
    assert times.redraw_s > 0 and times.bars > 100
    assert times.what_if_s > 0 and times.what_if_bars > 100
    assert timeline_redraw.table(times).row_count == 2


@pytest.mark.slow
def test_a_dry_run_and_a_plan_are_timed() -> None:
    app = typer.Typer()
    app.command()(at_scale.main)
    done = CliRunner().invoke(app, ["--depth", "1"])
    assert done.exit_code == 0 and "DDP of a GPT of 2.5B parameters" in done.output
    assert "GPT-3 on 1,024 ranks" in done.output and "layers recorded in" in done.output
