"""Deliberate faults in the vocabulary cut over ranks, each an edited line of its source."""

import pytest

import vocab_checks as checks
from harness import edits, noticed, on_ranks
from labkit import RankError
from labkit.parallel.tensor import layers

pytestmark = pytest.mark.slow

VOCAB = 5  # 3 rows on rank 0, 2 and one of padding on rank 1


EMBEDDING = checks.embedding_is_torchs, layers, VOCAB
LOSS = checks.loss_is_torchs, layers, VOCAB, 1e3
TIED = checks.tied_weights_train_as_one, layers, VOCAB
BYTES = checks.bytes_are_the_formulas, layers, VOCAB


def head() -> None:
    for gather in (True, False):
        checks.head_is_torchs(layers, VOCAB, gather)


SUMMED = "return (reduce_scatter_sequence if self.sequence else reduce_from_ranks)(x, self.comm)"
FAULTS = edits(
    layers,
    ("all ranks have the first rows",
     "start = min(comm.rank * length, size)", "start = 0", *EMBEDDING),
    ("others' tokens look up row 0",
     "x = x.masked_fill(~is_own.unsqueeze(-1), 0)", "", *EMBEDDING),
    ("what others looked up is not summed",
     SUMMED, "return x", *EMBEDDING),
    ("f in the place of g: the gradient is summed, x is not",
     SUMMED, "return copy_to_ranks(x, self.comm)", *EMBEDDING),
    ("the gradient of the head's x is one rank's",
     "elif comm.size > 1:", "elif False:", head),
    ("padding is seen among all logits",
     "[..., : self.out_features]", "", head),
    ("padding counts in the sum of exponentials",
     "value=-torch.inf", "value=0.0", *TIED),
    ("each rank takes off its own highest logit",
     'comm.all_reduce(peak, op="max")', "", *LOSS),
    ("each rank has its own sum",
     "reduce_from_ranks(both, comm)", "both", *LOSS),
    ("f, g: the gradient of the loss is counted on every rank",
     "reduce_from_ranks(both, comm)", "reduce_from_ranks(copy_to_ranks(both, comm), comm)", *LOSS),
    ("every rank has the target",
     ".squeeze(-1).masked_fill(~is_own, 0)", ".squeeze(-1)", *LOSS),
    ("the mean is over all targets",
     "losses.sum() / counts.sum()", "losses.mean()", *LOSS),
    ("exponentials of the logits as they are",
     "shifted = logits - peak.unsqueeze(-1)", "shifted = logits + 0 * peak.unsqueeze(-1)", *LOSS),
    ("the sum and the target travel one by one",
     "total, target = reduce_from_ranks(both, comm)",
     "total, target = (reduce_from_ranks(part, comm) for part in both)", *BYTES),
    ("the logits travel",
     "        if self.gather_output:\n",
     "        gather_from_ranks(logits, self.comm, -1)\n        if self.gather_output:\n",
     *BYTES),
)  # fmt: skip
pair = {"size": 2, "timeout_s": 5}  # some of the faults let ranks wait for each other
test_a_fault_turns_its_check_red = noticed(
    FAULTS, on_ranks, RankError, match="AssertionError", **pair
)
