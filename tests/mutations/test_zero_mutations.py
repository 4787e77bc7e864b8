"""Faulty ZeRO must turn the contract red."""

import pytest

from data_parallel_contract import Strategy, check_equal_to_single, torchs_own
from harness import Mutation, around, edits, given, instead, noticed, on_ranks
from labkit import DDP, World
from labkit.parallel.zero import buckets
from labkit.parallel.zero import zero as module
from test_data_parallel import check_accumulation
from test_zero import zero

pytestmark = pytest.mark.slow


def trains(world: World, stage: int, case: str = "gpt") -> None:
    check_equal_to_single(world, zero(stage), case)


def keeps_promises(world: World, real: Strategy, stage: int) -> None:
    """Another strategy under the promises of this stage."""
    promised = zero(stage)
    strategy = Strategy(real.wrap, real.optimizer, promised.predict, promised.sharded)
    check_equal_to_single(world, strategy, "gpt")


SENT = "bucket.sending = self.comm.reduce_scatter_tensor(share, gradients, async_op=async_op)"
OWN_OF_SECOND = f"""share.copy_(bucket.partition.share_of(gradients, self.comm.rank))
        if bucket is not self._buckets[1]:
            {SENT}"""
PUT, END = "self.put(p, 1 if divided else", "        return value\n\n    def skip"
WHOLE_STATE = """        for p in self._bucket_of:
            self.state[p]["exp_avg"] = torch.zeros_like(p)
"""
FAULTS = [
    mutation
    for stage in (1, 2)
    for mutation in (
        *edits(
            module,
            ("skips a reduce", SENT, OWN_OF_SECOND, trains, stage),
            ("skips a gather",
             "bucket.gather(", "bucket is self._buckets[1] or bucket.gather(", trains, stage),
            ("gathers twice", END, f"        self.after_load()\n{END}", trains, stage),
            ("steps on the share of rank 0 only",  # the state of the others stays empty
             "bucket.step(", "self.comm.rank == 1 or bucket.step(", trains, stage),
            ("keeps the state of all beside its share", END, WHOLE_STATE + END, trains, stage),
        ),
        *edits(
            buckets,
            ("divides twice", PUT, f"{PUT} self.comm.size *", trains, stage),
            ("forgets to divide", PUT, "self.put(p, 1 or", trains, stage),
            ("steps on unused parameters",  # they decay, where Single leaves them alone
             "if p in self.unused and not flagged_unused(arrived[piece.at : piece.at + 1])",
             "if p in self.unused", trains, stage, "awkward"),
        ),
    )
]  # fmt: skip
KEEPS_GRADIENTS = edits(
    buckets,
    ("keeps all gradients", "        self.free()\n        self._incoming", "        self._incoming",
     trains, 2),
)  # fmt: skip
SHARDS_NOTHING = [
    Mutation(Strategy(DDP, torchs_own), keeps_promises, 1, match="optimizer_bytes"),
    Mutation(Strategy(DDP, torchs_own), keeps_promises, 2, match="optimizer_bytes|gradient_bytes"),
    Mutation(zero(1), keeps_promises, 2, match="gradient_bytes"),
]
leaves_other_shares_dirty = instead(
    "leaves_other_shares_dirty", buckets.ZeroBucket, "_on_averages_received", lambda self: None
)

pair = {"size": 2, "timeout_s": 20}
test_a_faulty_optimizer_turns_the_contract_red = noticed(FAULTS, around, AssertionError, **pair)
test_stage_2_that_keeps_gradients_turns_the_contract_red = noticed(
    KEEPS_GRADIENTS, around, AssertionError, match="gradient_bytes", **pair
)
test_a_stage_that_shards_too_little_turns_the_contract_red = noticed(
    SHARDS_NOTHING, given, AssertionError, **pair
)
test_stage_1_that_leaves_other_shares_dirty_adds_them_twice = noticed(
    [Mutation(leaves_other_shares_dirty, check_accumulation, "zero-1", 0)], on_ranks, **pair
)
