"""What a user could do before the package was rearranged can still be done (support/freeze.py)."""

import re
import tarfile
from pathlib import Path

import pytest
import torch

import freeze
from labkit import load_checkpoint, read_run
from places import ROOT

# Commands that measure labkit itself are scripts for maintainers now: tests/benchmarks/README.md.
MOVED = re.compile(
    r"labkit bench (world|door|recording|plot|scale|calibrate)\b"
    r"|labkit bench replay --(depth|only) "  # tests/benchmarks/at_scale.py
)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    with tarfile.open(ROOT / "tests" / "data" / "frozen.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "frozen"


@pytest.mark.parametrize("what", ["names", "commands"])
def test_no_public_name_and_no_option_is_lost(frozen: Path, what: str) -> None:
    before = set((frozen / f"{what}.txt").read_text().splitlines())
    gone = before - set(getattr(freeze, what)())
    assert gone == {line for line in before if MOVED.match(line)}


def test_a_run_of_before_opens(frozen: Path) -> None:
    trace = read_run(frozen / "made" / "run")
    assert trace.complete and [len(trace.ranks[rank].comms) > 0 for rank in (0, 1)] == [True] * 2


def test_a_checkpoint_of_before_opens(frozen: Path) -> None:
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loaded = load_checkpoint(frozen / "made" / "checkpoints", model, optimizer)
    assert loaded.step == 2 and loaded.extra == {"seed": 3}
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
