"""The bench of number formats measures what it shows. No test asserts a time."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from labkit.bench import bench_precision, precision
from labkit.bench.precision import CASES
from labkit.bench.precision_found import Sizes, Steps, table
from labkit.cli import app
from labkit.predict import mfu, step_flops


def told(output: str) -> str:
    """In one line, without the frame that the command line puts around an error."""
    return " ".join(output.replace("│", " ").split())


SMALL = Sizes(vocab=64, width=32, depth=2, heads=4, length=16, rows=2)


@pytest.mark.slow
def test_cases_are_timed_in_the_same_turns_and_saved(tmp_path: Path) -> None:
    found = bench_precision(("tf32", "fp16", "fp8", "recompute"), 3, "cpu", SMALL)
    assert list(found.seconds) == ["fp16", "torch.amp fp16", "fp8", "recompute", "torch checkpoint"]
    assert {len(times) for times in found.seconds.values()} == {3}
    told = json.loads(found.save(tmp_path / "new" / "steps.json").read_text())
    assert told["about"]["date"] and told["about"]["device"] and told["about"]["torch"]
    assert told["cases"]["fp16"]["peak_bytes"] == found.peak_bytes["fp16"]
    assert told["cases"]["fp16"]["mfu"] is None, "nobody says what this CPU's peak is"
    assert len(told["ratios"]) == 2
    assert table(found).row_count == len(found.seconds)
    peaks = found.peak_bytes
    assert peaks["recompute"] == peaks["torch checkpoint"]


def test_names_and_folders_are_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "precision", "--only", "fp7"])
    assert "no case 'fp7' is timed; choose of fp32" in told(done.output)
    done = CliRunner().invoke(app, ["bench", "precision", "--save", str(tmp_path)])
    assert "is a folder" in told(done.output)


def test_a_named_case_brings_its_peer() -> None:
    where = torch.device("cpu")
    names = [name for name in CASES if precision._wanted(name, ["recompute"])]
    assert names == ["recompute", "torch checkpoint"]
    assert not precision._is_there("tf32", where)


def test_mfu_is_of_the_peak_of_the_format() -> None:
    seconds = {"bf16": [0.1, 0.1, 0.1], "torch.amp bf16": [0.2] * 3, "recompute": [0.1] * 3}
    found = Steps({"device": "NVIDIA H200"}, SMALL, seconds, dict.fromkeys(seconds, 1))
    flops = step_flops(vocab=64, width=32, depth=2, heads=4, rows=2, sequence=16)
    assert found.mfu("bf16") == mfu(flops, 0.1, 989.4e12)
    assert found.mfu("torch.amp bf16") == mfu(flops, 0.2, 989.4e12)
    assert found.mfu("recompute") is None
    assert found.ratio("bf16", "torch.amp bf16") == (0.5, 0.5, 0.5)


@pytest.mark.gpu
def test_a_gpu_times_its_formats(tmp_path: Path) -> None:
    found = bench_precision(turns=3, device="cuda", sizes=SMALL)
    assert {"fp32", "bf16", "fp16"} <= found.seconds.keys()
    assert all(nbytes > 0 for nbytes in found.peak_bytes.values())
    assert torch.get_float32_matmul_precision() == "highest"
