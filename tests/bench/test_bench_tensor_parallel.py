"""`labkit bench tensor-parallel`: all sides train the same model, and what is shown is timed."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from labkit import World, bench
from labkit.bench import tensor_parallel
from labkit.bench.tensor_parallel import CONTESTS, FLOOR, SIDES, Side, Steps, stepper
from labkit.cli import app
from labkit.models import GPT


@pytest.mark.slow
def test_every_side_trains_the_same_model(world2: World) -> None:
    def losses() -> dict[str, list[float]]:
        found = {}
        for name, side in SIDES.items():
            step = stepper(side, "tiny", rows=2)
            found[name] = [step()[1] for _ in range(3)]
        return found

    alone = stepper(Side(lambda model: model, tensor_parallel._whole), "tiny", rows=2)
    expected = [alone()[1] for _ in range(3)]
    for of_rank in world2.run(losses):
        assert of_rank.pop(FLOOR) != pytest.approx(expected, abs=1e-3), "it sums nothing"
        for found in of_rank.values():
            assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_the_bench_times_every_side_in_the_same_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tensor_parallel, "STEPS", 1)
    (found,) = bench.bench_tensor_parallel(ranks=(2,), models=("tiny",), turns=3)
    for one in (found.whole, found.without_adamw):
        assert set(one.seconds) == set(SIDES) and {len(of) for of in one.seconds.values()} == {3}
    for name in SIDES:
        whole, without = found.whole.seconds[name], found.without_adamw.seconds[name]
        assert all(0 < b < a for a, b in zip(whole, without, strict=True))
    assert tensor_parallel.table([found]).row_count == len(CONTESTS) == 2
    saved = json.loads(tensor_parallel.save([found], tmp_path / "new" / "x.json").read_text())
    assert saved["about"]["torch"] == torch.__version__
    (steps,) = saved["steps"]
    assert (steps["ranks"], steps["model"]) == (2, "tiny")
    assert steps["step_s"] == found.whole.seconds


def test_a_ratio_is_the_median_of_ratios() -> None:
    steps = Steps(2, "tiny", {"tensor": [1.0, 2, 9], "DTensor": [2.0, 1, 3]})
    assert steps.ratio(CONTESTS["parts"])[1] == 2


def test_the_floor_has_the_part_of_one_rank() -> None:
    def held() -> tuple[int, int]:
        cut = SIDES[FLOOR].cut(GPT.preset("tiny"))
        real = SIDES["tensor"].cut(GPT.preset("tiny"))
        return sum(p.numel() for p in cut.parameters()), sum(p.numel() for p in real.parameters())

    with World(2, check=False) as pair:
        assert [a == b for a, b in pair.run(held)] == [True, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "5M"], "no model '5M'; choose of tiny, 1M, 3.4M"),
        (["--ranks", "two"], "'two' is no number of ranks"),
        (["--save", "."], "is a folder"),
        (["--turns", "1"], "turns"),
    ],
)
def test_bad_options_are_told(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "tensor-parallel", *options])
    assert done.exit_code == 2 and words in " ".join(done.output.split())
