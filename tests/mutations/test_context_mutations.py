"""Deliberate faults in context parallelism, each an edited line of its source."""

import pytest

import context_checks as checks
from harness import Edit, Mutation, instead, noticed, on_ranks
from labkit import RankError

pytestmark = pytest.mark.slow

EXACT = (checks.attention_is_exact, "ring", 4, 2, 48)
ULYSSES = (checks.attention_is_exact, "ulysses", 6, 3, 24)
TRAINED = (checks.training_equals_one_process, "ring")
BYTES = (checks.bytes_are_those_predicted, "ring")
OVERLAP = (checks.blocks_travel_while_the_rank_computes,)
BALANCE = (checks.every_rank_computes_as_much,)
MEMORY = (checks.memory_is_linear_in_the_shard,)
EDITS = [  # check, module, fault: what is replaced, by what
    (EXACT, "ring_attention", "results are added, not merged",
     "    out *= torch.exp(logsum - both).unsqueeze(-1)\n", ""),
    (EXACT, "ring_attention", "a merged row keeps its old sum",
     "    logsum.copy_(both)\n", ""),
    (EXACT, "ring_attention", "a rank after is seen by all queries",
     "(slice(half, length), full, False)", "(full, full, False)"),
    (EXACT, "ring_attention", "early and late half are swapped",
     "(full, slice(0, half), False)", "(full, slice(half, length), False)"),
    (EXACT, "ring_attention", "the own block is not causal",
     "return full, full, True", "return full, full, False"),
    (EXACT, "ring_attention", "a block's owner is miscounted",
     "(comm.rank - step) % comm.size", "(comm.rank + step) % comm.size"),
    (EXACT, "ring_attention", "a block's gradient is left with the others",
     "            own_dkv += arriving\n", "            pass\n"),
    (EXACT, "ring_attention", "what the ranks before have found is lost",
     "leaving, arriving = arriving, torch.empty_like(own_dkv)",
     "leaving, arriving = torch.zeros_like(own_dkv), torch.empty_like(own_dkv)"),
    (TRAINED, "ring_attention", "gradients of one process, not of all",
     "leaving[:, :, :, keys] += torch.stack(dkv)",
     "leaving[:, :, :, keys] += 0 * torch.stack(dkv)"),
    (OVERLAP, "ring_attention", "the block is waited for before it is computed with",
     "        yield (comm.rank - step) % comm.size, block\n"
     "        assert handle is not None\n        handle.wait()\n",
     "        assert handle is not None\n"
     "        handle.wait()\n        yield (comm.rank - step) % comm.size, block\n"),
    (OVERLAP, "ring_attention", "gradients are sent and waited for",
     "handle = comm.ring_exchange(arriving, leaving, async_op=True)",
     "handle = comm.ring_exchange(arriving, leaving, async_op=True); handle.wait()"),
    (BYTES, "ring_attention", "a block makes the whole round",
     "for step in range(comm.size - 1):\n        arriving",
     "for step in range(0 if (comm.ring_exchange(torch.empty_like(block), block)) else "
     "comm.size - 1):\n        arriving"),
    (BALANCE, "ring_attention", "scores are computed, then masked",
     "    if owner == rank:\n        return full", "    if owner <= rank:\n        return full"),
    (MEMORY, "ring_attention", "all blocks are kept for backward",
     "ctx.save_for_backward(q, k, v, out, logsum)",
     "ctx.save_for_backward(q, k, v, out, logsum, block)"),
    (MEMORY, "ring_attention", "memory of a square",
     "        out = out.to(q.dtype)\n",
     "        _ = queries @ queries.transpose(2, 3)\n        out = out.to(q.dtype)\n"),
    (ULYSSES, "zigzag", "tokens of a head are in the order of the ranks",
     "return torch.cat([*early, *reversed(late)], dim)", "return torch.cat([*early, *late], dim)"),
    (EXACT, "zigzag", "shards are contiguous",
     "[chunks[r], chunks[2 * ranks - 1 - r]]", "[chunks[2 * r], chunks[2 * r + 1]]"),
    (ULYSSES, "ulysses", "heads come back in another order",
     "return torch.cat(arriving, dim=1)", "return torch.cat(arriving[::-1], dim=1)"),
    (ULYSSES, "ulysses", "the gradient is not brought back",
     "to_sequence, to_heads, self.comm)",
     "to_sequence, lambda dx, comm: to_heads(dx * 0 + dx.sum(), comm), self.comm)"),
]  # fmt: skip
FAULTS = [
    Mutation(Edit(label, f"labkit.parallel.context.{module}", old, new), *check)
    for check, module, label, old, new in EDITS
]
no_positions = instead(
    "positions are left out", checks.context, "_FillPositions", lambda *_: lambda *_: None
)
FAULTS += [Mutation(no_positions, *TRAINED, match="weights are off by")]
trio = {"size": 3, "timeout_s": 5}  # some of the faults let ranks wait for each other
test_a_fault_turns_its_check_red = noticed(
    FAULTS, on_ranks, RankError, match="AssertionError", **trio
)
