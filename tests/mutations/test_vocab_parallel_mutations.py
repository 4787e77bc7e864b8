"""Deliberate faults in the vocabulary cut over ranks; each must turn its check red.

A fault is a line of labkit/parallel/tensor/vocab.py, and what it becomes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vocab_checks
from labkit import RankError, World
from labkit.parallel.common.conjugate import copy_to_ranks
from labkit.parallel.tensor import vocab as vocab_parallel

pytestmark = pytest.mark.slow

VOCAB = 5  # 3 rows on rank 0, 2 and one of padding on rank 1
FAULTS: dict[str, tuple[Callable[..., None], str, str]] = {
    "others' tokens look up row 0": (
        vocab_checks.embedding_is_torchs,
        "x = x.masked_fill(~mine.unsqueeze(-1), 0)",
        "",
    ),
    "what others looked up is not summed": (
        vocab_checks.embedding_is_torchs,
        "return reduce_from_ranks(x, self.comm)",
        "return x",
    ),
    "f in the place of g: the gradient is summed, x is not": (
        vocab_checks.embedding_is_torchs,
        "return reduce_from_ranks(x, self.comm)",
        "return copy_to_ranks(x, self.comm)",
    ),
    "all ranks have the first rows": (
        vocab_checks.embedding_is_torchs,
        "start = min(comm.rank * height, vocab)",
        "start = 0",
    ),
    "the gradient of the head's x is one rank's": (
        vocab_checks.head_is_torchs,
        "logits = super().forward(x)",
        "logits = F.linear(x, self.weight, self.bias)",
    ),
    "padding is seen among all logits": (
        vocab_checks.head_is_torchs,
        "[..., : self.out_features]",
        "",
    ),
    "padding counts in the sum of exponentials": (
        vocab_checks.tied_weights_train_as_one,
        "value=-math.inf",
        "value=0.0",
    ),
    "each rank takes off its own highest logit": (
        vocab_checks.loss_is_torchs,
        'comm.all_reduce(peak, op="max")',
        "",
    ),
    "each rank has its own sum": (
        vocab_checks.loss_is_torchs,
        "reduce_from_ranks(both, comm)",
        "both",
    ),
    "f, g: the gradient of the loss is counted on every rank": (
        vocab_checks.loss_is_torchs,
        "reduce_from_ranks(both, comm)",
        "reduce_from_ranks(copy_to_ranks(both, comm), comm)",
    ),
    "every rank has the target": (
        vocab_checks.loss_is_torchs,
        ".squeeze(-1).masked_fill(~mine, 0)",
        ".squeeze(-1)",
    ),
    "the mean is over all targets": (
        vocab_checks.loss_is_torchs,
        "losses.sum() / counts.sum()",
        "losses.mean()",
    ),
    "exponentials of the logits as they are": (
        vocab_checks.loss_is_torchs,
        "shifted = logits - peak.unsqueeze(-1)",
        "shifted = logits + 0 * peak.unsqueeze(-1)",
    ),
    "the sum and the target travel one by one": (
        vocab_checks.bytes_are_the_formulas,
        "total, picked = reduce_from_ranks(both, comm)",
        "total, picked = (reduce_from_ranks(one, comm) for one in both)",
    ),
    "the logits travel": (
        vocab_checks.bytes_are_the_formulas,
        "        if self.gather_output:\n",
        "        gather_from_ranks(logits, self.comm, -1)\n        if self.gather_output:\n",
    ),
}


def faulty(check: Callable[..., None], old: str, new: str) -> None:
    source = Path(vocab_parallel.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the file"
    names: dict[str, Any] = {"__name__": "faulty", "copy_to_ranks": copy_to_ranks}
    exec(compile(source.replace(old, new), "faulty.py", "exec"), names)
    made = SimpleNamespace(**names)
    if check is vocab_checks.head_is_torchs:
        for gather in (True, False):
            check(made, VOCAB, gather)
    elif check is vocab_checks.loss_is_torchs:
        check(made, VOCAB, 1e3)
    else:
        check(made, VOCAB)


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2, timeout_s=5) as world:  # some of the faults let ranks wait for each other
        yield world


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_its_check_red(pair: World, fault: str) -> None:
    with pytest.raises(RankError, match="AssertionError"):
        pair.run(faulty, *FAULTS[fault])


def test_without_a_fault_the_checks_are_green(pair: World) -> None:
    for check in {check for check, _, _ in FAULTS.values()}:
        pair.run(faulty, check, "import math\n", "import math\n")
