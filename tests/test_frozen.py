"""What a user could do before the package was rearranged can still be done (support/freeze.py)."""

import re
import tarfile
from pathlib import Path

import pytest
import torch

import freeze
from labkit import load_checkpoint, read_run
from places import ROOT

GONE = {  # names and options that are no longer there, with the reason
    "  ZeroOptimizer.bucket_of_copy(self, p: torch.nn.parameter.Parameter) -> ZeroBucket": (
        "called by pipelines alone: `gradient_of_copy` of the Sharder protocol"
    ),
    "  Pipeline.step(self, x: torch.Tensor, y: torch.Tensor, scaler: GradScaler | None = None) -> "
    "torch.Tensor | None": "takes the same: a GradScaler is a LossScaler",
    "labkit compare --lr default=0.003 limits=[None, None, False]": "0.001: no spike of the loss",
    "labkit run --lr default=0.003 limits=[None, None, False]": "0.001: no spike of the loss",
}
RENAMED = (  # parameters, a property and a type that are called otherwise now
    ("thing: Any", "obj: Any"), ("progress(things:", "progress(items:"),
    ("parts: collections", "microbatches: collections"), ("~Part]", "~MicroBatch]"),
    ("(cls, what: str", "(cls, operation: str"), ("Work, what: str", "Work, operation: str"),
    ("**of_linear", "**kwargs"), ("**of_embedding", "**kwargs"),
    ("Linear.beside:", "Linear.parallel_siblings:"), ("Head.beside:", "Head.parallel_siblings:"),
    ("UnderWay", "PendingReduction"),
)  # fmt: skip
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
    text = (frozen / f"{what}.txt").read_text()
    for old, new in RENAMED:
        text = text.replace(old, new)
    before = set(text.splitlines())
    moved = {line for line in before if MOVED.match(line)}
    assert before - set(getattr(freeze, what)()) == (GONE.keys() & before) | moved


def test_a_run_of_before_opens(frozen: Path) -> None:
    trace = read_run(frozen / "made" / "run")
    assert trace.complete and [len(trace.ranks[rank].comms) > 0 for rank in (0, 1)] == [True] * 2


def test_a_checkpoint_of_before_opens(frozen: Path) -> None:
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loaded = load_checkpoint(frozen / "made" / "checkpoints", model, optimizer)
    assert loaded.step == 2 and loaded.extra == {"seed": 3}
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
