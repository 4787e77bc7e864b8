"""The benches of a step: both sides train the same model in the same turns. No time is asserted."""

import math
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import GPT, Comm, World, bench, schedule
from labkit.bench import data_parallel, harness, pipeline, precision, replay, tensor_parallel
from labkit.bench.harness import Contest, StepTimes
from labkit.bench.pipeline import Floor, floor_s, stages_of
from labkit.predict import mfu, step_flops
from tables import raises

SMALL = precision.Sizes(vocab=64, width=32, depth=2, heads=4, context=16, rows=2)


@pytest.mark.parametrize("shuffled", [False, True])
def test_cases_take_turns_in_orders_that_differ(shuffled: bool) -> None:
    calls: list[str] = []

    def case(name: str) -> float:
        calls.append(name)
        return len(calls)

    samples = harness.take_turns({x: partial(case, x) for x in "abcd"}, 20, "", shuffled)
    turns = ["".join(calls[i : i + 4]) for i in range(0, 80, 4)]
    assert {"".join(sorted(turn)) for turn in turns} == {"abcd"}
    if shuffled:
        assert len(set(turns)) > 10
    else:
        assert turns[:5] == ["abcd", "bcda", "cdab", "dabc", "abcd"]
    assert sorted(x for column in samples.values() for x in column) == list(range(1, 81))
    assert samples["c"][0] == turns[0].index("c") + 1


def test_the_time_of_a_step_is_the_mean_with_the_last_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1, 2 and 6 s, after 5 s of preparation and before 3 s of waiting."""
    passed_s: list[float] = []
    monkeypatch.setattr(harness.time, "perf_counter", lambda: sum(passed_s))
    steps_s = iter((1.0, 2.0, 6.0))
    before, after = (partial(passed_s.append, seconds) for seconds in (5.0, 3.0))
    step_s = harness.seconds_of(lambda: passed_s.append(next(steps_s)), 3, before, after)
    assert passed_s == [5.0, 1.0, 2.0, 6.0, 3.0] and step_s == 4.0


def test_a_ratio_is_the_median_of_ratios() -> None:
    forward = {"ddp": [1.0] * 3, "torch DDP": [4.0] * 3}
    figures = {"forward": forward, "floor_s": {"ddp": 1.6}}
    times = StepTimes({}, {"ddp": [1.0, 2, 9], "torch DDP": [2.0, 1, 3]}, figures=figures)
    assert times.ratio("ddp", "torch DDP")[1] == 2 and times.ms("ddp") == 2000
    assert times.ratio("ddp", "torch DDP", "forward") == (0.25, 0.25, 0.25)
    assert pipeline.over_floor(times, "ddp") == 1.25


def test_results_read_back_and_other_files_are_refused(tmp_path: Path) -> None:
    samples = {"a": [1.0, 2, 3], "b": [2.0, 2, 2]}
    times = StepTimes({"ranks": 2}, samples, [Contest("a", "b", 0.9)], {"peak": {"a": 5}})
    path = harness.save([times, times], tmp_path / "new" / "x.json")
    assert harness.read(path) == [times, times]
    assert f'"torch": "{torch.__version__}"' in path.read_text()
    for text in ("", "[]", "{}", '{"steps": [{}]}', '{"steps": [3]}'):
        path.write_text(text)
        raises("was not saved by `labkit bench NAME`", harness.read, path)


def assert_timed(times: StepTimes, names: Iterable[str]) -> None:
    """These cases and no others, in three turns each."""
    assert times.seconds.keys() == set(names)
    for samples in times.seconds.values():
        assert len(samples) == 3 and min(samples) > 0


@pytest.mark.slow
def test_data_parallelism_times_every_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "STEPS", 1)
    (times,) = bench.bench_data_parallel(ranks=(2,), models=("tiny",), turns=3)
    assert_timed(times, data_parallel.STRATEGIES)
    assert data_parallel.table([times]).row_count == len(data_parallel.CONTESTS) == 4


@pytest.mark.slow
def test_every_case_of_tensor_parallelism_trains_the_same_model(world2: World) -> None:
    def losses(case: tensor_parallel.Case) -> list[float]:
        step = tensor_parallel.stepper(case, "tiny", rows=2)
        return [step()[1] for _ in range(3)]

    def of_cases() -> dict[str, list[float]]:
        return {name: losses(case) for name, case in tensor_parallel.CASES.items()}

    expected = losses(tensor_parallel.Case(lambda model: model, harness.mean_loss))
    for of_rank in world2.run(of_cases):
        silent = of_rank.pop(tensor_parallel.FLOOR)
        assert silent != pytest.approx(expected, abs=1e-3), "it sums nothing"
        for trained in of_rank.values():
            assert trained == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_tensor_parallelism_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensor_parallel, "STEPS", 1)
    (times,) = bench.bench_tensor_parallel(ranks=(2,), models=("tiny",), turns=3)
    without = times.figures[tensor_parallel.WITHOUT_ADAMW]
    assert_timed(times, tensor_parallel.CASES)
    assert set(without) == set(tensor_parallel.CASES)
    for name, whole in times.seconds.items():
        assert all(0 < b < a for a, b in zip(whole, without[name], strict=True))
    assert tensor_parallel.table([times]).row_count == 2
    assert harness.read(harness.save([times], tmp_path / "x.json")) == [times]


def test_the_floor_of_tensor_parallelism_has_the_slices_of_one_rank(world2: World) -> None:
    def elements(name: str) -> int:
        model = tensor_parallel.CASES[name].parallelize(GPT.preset("tiny"))
        return sum(p.numel() for p in model.parameters())

    assert world2.run(elements, tensor_parallel.FLOOR) == world2.run(elements, "tensor")


@pytest.mark.slow
def test_both_pipelines_have_the_loss_and_the_gradients_of_one_process(world2: World) -> None:
    def differences() -> dict[str, tuple[float, float | None]]:
        comm, largest, batch = Comm(), {}, pipeline.batch()
        for name, side in product(pipeline.SCHEDULES, pipeline.SIDES):
            alone, stages = (stages_of("tiny", name, comm.size) for _ in range(2))
            loss = harness.mean_loss(torch.nn.Sequential(*alone)(batch.x), batch.y)
            loss.backward()
            step = pipeline.stepper(side, stages, name, 4, comm)
            step()
            value = step()  # the gradients are those of one step
            off = [
                float((p.grad - q.grad).abs().max())
                for k in range(comm.rank, len(stages), comm.size)
                for p, q in zip(stages[k].parameters(), alone[k].parameters(), strict=True)
            ]
            largest[side + name] = max(off), None if value is None else float(value - loss)
        return largest

    first, last = world2.run(differences)
    assert len(last) == 2 * len(pipeline.SCHEDULES)
    for off, loss_off in [*first.values(), *last.values()]:
        assert off < 1e-5 and abs(loss_off or 0.0) < 1e-5
    assert all(loss_off is not None for _, loss_off in last.values())


@pytest.mark.slow
def test_a_pipeline_and_floor_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pipeline, "STEPS", 1)
    (times,) = bench.bench_pipeline(["zb-h1", "1f1b"], (2,), ("tiny",), microbatches=2, turns=3)
    assert_timed(times, ["1f1b", "torch 1f1b", "zb-h1", "torch zb-h1"])
    floors_s = times.figures["floor_s"]
    assert set(floors_s) == {"1f1b", "zb-h1"} and min(floors_s.values()) > 0
    shown = pipeline.table([times])
    assert shown.row_count == 2 and "16 x 64 tokens in 2 micro-batches" in str(shown.title)
    assert harness.read(harness.save([times], tmp_path / "x.json")) == [times]


def test_the_floor_is_computing_and_the_bubble() -> None:
    """(m + p - 1)(F + B) by 1F1B; no less than all of it over the cores."""
    actions = schedule("1f1b", 4, 8)
    taken = [[1.0 if x.phase == "forward" else 2.0 for x in stage] for stage in actions]
    assert floor_s(actions, taken, cores=4) == pytest.approx((8 + 3) * 3)
    assert floor_s(actions, taken, cores=2) == pytest.approx(4 * 8 * 3 / 2)
    halves = schedule("zb-h1", 4, 8)
    assert floor_s(halves, [[1.0] * 24] * 4, cores=4) == pytest.approx(24 + 3)


def test_the_floor_computes_what_a_stage_does_and_sends_nothing(worlds: Any) -> None:
    def measured() -> tuple[int, bool]:
        floor = Floor("tiny", "zb-h1", 2, Comm())
        floor.measure()
        (actions,) = floor.measure()
        (stage,) = floor.stages
        return len(actions), all(p.grad is not None for p in stage.module.parameters())

    assert worlds(1).run(measured) == [(6, True)]


@pytest.mark.slow
def test_formats_are_timed_in_the_same_turns_and_saved(tmp_path: Path) -> None:
    (times,) = bench.bench_precision(("tf32", "fp16", "fp8", "recompute"), 3, "cpu", SMALL)
    names = ["fp16", "torch.amp fp16", "fp8", "recompute", "torch checkpoint"]
    assert list(times.seconds) == names
    assert_timed(times, names)
    assert times.about["date"] and times.about["device"] and times.about["torch"]
    assert [contest.ours for contest in times.contests] == ["fp16", "recompute"]
    assert times.figures["mfu"]["fp16"] is None, "this CPU's peak is unknown"
    assert precision.table([times]).row_count == len(times.seconds)
    peaks = times.figures["peak_bytes"]
    assert peaks["recompute"] == peaks["torch checkpoint"]
    assert harness.read(harness.save([times], tmp_path / "x.json")) == [times]


def test_mfu_is_of_the_peak_of_the_format() -> None:
    seconds = {"bf16": [0.1] * 3, "torch.amp bf16": [0.2] * 3, "recompute": [0.1] * 3}
    flops = step_flops(vocab=64, width=32, depth=2, heads=4, rows=2, sequence=16)
    for gpu, peak in (
        ("NVIDIA H200", 989.4e12), ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ):  # fmt: skip
        times = StepTimes({"device": gpu}, seconds)
        assert precision.mfu_of(times, "bf16", SMALL) == mfu(flops, 0.1, peak)
        assert precision.mfu_of(times, "torch.amp bf16", SMALL) == mfu(flops, 0.2, peak)
        assert precision.mfu_of(times, "recompute", SMALL) is None
    peaks = precision.cluster("dgx-h100").device.peak_flops
    assert set(precision.PEAK_OF.values()) < peaks.keys()
    assert math.isclose(peaks["fp8"], 2 * peaks["bfloat16"], rel_tol=1e-3)


@pytest.mark.gpu
def test_a_gpu_times_its_formats() -> None:
    (times,) = bench.bench_precision(turns=3, device="cuda", sizes=SMALL)
    assert {"fp32", "bf16", "fp16"} <= times.seconds.keys()
    assert all(nbytes > 0 for nbytes in times.figures["peak_bytes"].values())
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.slow
def test_a_replay_is_timed_beside_the_measured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replay.MODELS, "tiny", ("tiny", {}))
    (times,) = bench.bench_replay(("tiny",), turns=3)
    assert_timed(times, ["replayed", "measured", "computing"])
    assert 0 < times.ms("computing") < times.ms("replayed")
    assert replay.table([times]).row_count == 1
