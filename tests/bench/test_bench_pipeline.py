"""`labkit bench pipeline`: both sides train the same model, and the floor is what it says."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from labkit import World, bench
from labkit.bench import pipeline
from labkit.bench.pipeline import SCHEDULES, Found, contest, ours, theirs
from labkit.bench.pipeline_floor import Floor, floor_s, stages_of
from labkit.cli import app
from labkit.comm import Comm
from labkit.schedules import schedule


@pytest.mark.slow
def test_both_sides_have_the_loss_and_the_gradients_of_one_process(world2: World) -> None:
    def found() -> dict[str, tuple[float, float | None]]:
        comm, largest = Comm(), {}
        for name in SCHEDULES:
            alone = stages_of("tiny", name, comm.size)
            x, y = pipeline.batch()
            loss = pipeline.loss_of(torch.nn.Sequential(*alone)(x), y)
            loss.backward()
            for side in (ours, theirs):
                stages = stages_of("tiny", name, comm.size)
                step = side(stages, name, 4, comm)
                step()
                value = step()  # the gradients are those of one step
                off = [
                    float((p.grad - q.grad).abs().max())
                    for k in range(comm.rank, len(stages), comm.size)
                    for p, q in zip(stages[k].parameters(), alone[k].parameters(), strict=True)
                ]
                about = None if value is None else float(value - loss)
                largest[f"{side.__name__} {name}"] = max(off), about
        return largest

    first, last = world2.run(found)
    assert set(last) == {f"{side} {name}" for side in ("ours", "theirs") for name in SCHEDULES}
    for off, about in [*first.values(), *last.values()]:
        assert off < 1e-5 and abs(about or 0.0) < 1e-5
    assert all(about is not None for _, about in last.values())


@pytest.mark.slow
def test_the_bench_times_both_sides_and_the_floor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pipeline, "STEPS", 1)
    (found,) = bench.bench_pipeline(["zb-h1", "1f1b"], (2,), ("tiny",), microbatches=2, turns=3)
    assert set(found.seconds) == {"1f1b", "torch 1f1b", "zb-h1", "torch zb-h1"}
    assert {len(turns) for turns in found.seconds.values()} == {3}
    assert set(found.floors_s) == {"1f1b", "zb-h1"} and min(found.floors_s.values()) > 0
    shown = pipeline.table([found])
    assert shown.row_count == 2 and "16 x 64 tokens in 2 micro-batches" in str(shown.title)
    saved = json.loads(pipeline.save([found], tmp_path / "new" / "x.json").read_text())
    assert saved["about"]["torch"] == torch.__version__ and saved["about"]["rows"] == 16
    (steps,) = saved["steps"]
    assert (steps["ranks"], steps["model"], steps["microbatches"]) == (2, "tiny", 2)
    assert steps["step_s"] == found.seconds and steps["floor_s"] == found.floors_s


def test_the_floor_is_computing_and_the_bubble() -> None:
    """(m + p - 1)(F + B) by 1F1B; no less than all of it over the cores."""
    actions = schedule("1f1b", 4, 8)
    found = [[1.0 if one.phase == "forward" else 2.0 for one in own] for own in actions]
    assert floor_s(actions, found, cores=4) == pytest.approx((8 + 3) * 3)
    assert floor_s(actions, found, cores=2) == pytest.approx(4 * 8 * 3 / 2)
    halves = schedule("zb-h1", 4, 8)
    assert floor_s(halves, [[1.0] * 24] * 4, cores=4) == pytest.approx(24 + 3)


def test_the_floor_computes_what_a_stage_does_and_sends_nothing() -> None:
    with World(1, check=False) as alone:

        def measured() -> tuple[int, bool]:
            floor = Floor("tiny", "zb-h1", 2, Comm())
            floor.measure()
            floor.measure()
            (stage,) = floor.stages
            return len(floor.turns[0][0]), all(
                p.grad is not None for p in stage.module.parameters()
            )

        assert alone.run(measured) == [(6, True)]


def test_a_ratio_is_the_median_of_ratios_and_over_is_of_medians() -> None:
    seconds = {"1f1b": [1.0, 2, 9], "torch 1f1b": [2.0, 1, 3]}
    one = Found(2, "tiny", seconds, 8, {"1f1b": 1.6})
    assert one.ratio(contest("1f1b"))[1] == 2
    assert one.over("1f1b") == 1.25


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "5M"], "no model '5M'; choose of tiny, 1M, 3.4M"),
        (["--ranks", "two"], "'two' is no number of ranks"),
        (["--only", "naive"], "no schedule 'naive' is timed; choose of gpipe, 1f1b"),
        (["--microbatches", "3"], "3 micro-batches of 16 rows"),
        (["--microbatches", "2"], "torch wants one a rank, 4"),
        (["--ranks", "9"], "gpipe on 9 ranks: the model has 8 blocks"),
        (["--save", "."], "is a folder"),
        (["--turns", "1"], "turns"),
    ],
)
def test_bad_options_are_told(options: list[str], words: str) -> None:
    if "--microbatches" in options:
        options = ["--only", "1f1b", *options]
    done = CliRunner().invoke(app, ["bench", "pipeline", *options])
    assert done.exit_code == 2 and words in " ".join(done.output.split())
