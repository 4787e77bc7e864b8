"""Deliberate faults in context parallelism, each an edited line of its source."""

from typing import Any

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


def no_hook(*_: Any) -> None:
    pass


def edited(label: str, check: tuple[Any, ...], module: str, old: str, new: str) -> Mutation:
    return Mutation(Edit(label, f"labkit.parallel.context.{module}", old, new), *check)


FAULTS = [
    edited(
        "results are added, not merged", EXACT,
        "ring_attention", "    out *= torch.exp(logsum - both).unsqueeze(-1)\n", "",
    ),
    edited(
        "a merged row keeps its old sum", EXACT,
        "ring_attention", "    logsum.copy_(both)\n", "",
    ),
    edited(
        "a rank after is seen by all queries", EXACT,
        "ring_attention", "(slice(half, length), every, False)", "(every, every, False)",
    ),
    edited(
        "early and late half are swapped", EXACT,
        "ring_attention", "(every, slice(0, half), False)", "(every, slice(half, length), False)",
    ),
    edited(
        "the own block is not causal", EXACT,
        "ring_attention", "return every, every, True", "return every, every, False",
    ),
    edited(
        "a block's owner is miscounted", EXACT,
        "ring_attention", "(comm.rank - step) % comm.size", "(comm.rank + step) % comm.size",
    ),
    edited(
        "a block's gradient is left with the others", EXACT,
        "ring_attention", "            at_home += arriving\n", "            pass\n",
    ),
    edited(
        "what the ranks before have found is lost", EXACT,
        "ring_attention", "grown, arriving = arriving, torch.empty_like(at_home)",
        "grown, arriving = torch.zeros_like(at_home), torch.empty_like(at_home)",
    ),
    edited(
        "gradients of one process, not of all", TRAINED,
        "ring_attention", "grown[:, :, :, keys] += torch.stack(dkv)",
        "grown[:, :, :, keys] += 0 * torch.stack(dkv)",
    ),
    edited(
        "the block is waited for before it is computed with", OVERLAP,
        "ring_attention", "        yield (comm.rank - step) % comm.size, block\n"
        "        assert handle is not None\n        handle.wait()\n",
        "        assert handle is not None\n        handle.wait()\n"
        "        yield (comm.rank - step) % comm.size, block\n",
    ),
    edited(
        "gradients are sent and waited for", OVERLAP,
        "ring_attention", "handle = comm.ring_exchange(arriving, grown, async_op=True)",
        "handle = comm.ring_exchange(arriving, grown, async_op=True); handle.wait()",
    ),
    edited(
        "a block makes the whole round", BYTES,
        "ring_attention", "for step in range(comm.size - 1):\n        arriving",
        "for step in range(0 if (comm.ring_exchange(torch.empty_like(block), block)) else "
        "comm.size - 1):\n        arriving",
    ),
    edited(
        "scores are computed, then masked", BALANCE,
        "ring_attention", "    if owner == rank:\n        return every",
        "    if owner <= rank:\n        return every",
    ),
    edited(
        "all blocks are kept for backward", MEMORY,
        "ring_attention", "ctx.save_for_backward(q, k, v, out, logsum)",
        "ctx.save_for_backward(q, k, v, out, logsum, block)",
    ),
    edited(
        "memory of a square", MEMORY,
        "ring_attention", "        out = out.to(q.dtype)\n",
        "        _ = queries @ queries.transpose(2, 3)\n        out = out.to(q.dtype)\n",
    ),
    edited(
        "tokens of a head are in the order of the ranks", ULYSSES,
        "zigzag", "return torch.cat([*early, *reversed(late)], dim)",
        "return torch.cat([*early, *late], dim)",
    ),
    edited(
        "shards are contiguous", EXACT,
        "zigzag", "[chunks[r], chunks[2 * ranks - 1 - r]]", "[chunks[2 * r], chunks[2 * r + 1]]",
    ),
    edited(
        "heads come back in another order", ULYSSES,
        "ulysses", "return torch.cat(arriving, dim=1)", "return torch.cat(arriving[::-1], dim=1)",
    ),
    edited(
        "the gradient is not brought back", ULYSSES,
        "ulysses", "to_sequence, to_heads, self.comm)",
        "to_sequence, lambda dx, comm: to_heads(dx * 0 + dx.sum(), comm), self.comm)",
    ),
    Mutation(
        instead("positions are left out", checks.context, "_PositionsFilledIn", lambda *_: no_hook),
        *TRAINED, match="weights are off by",
    ),
]  # fmt: skip


trio = {"size": 3, "timeout_s": 5}  # some of the faults let ranks wait for each other
test_a_fault_turns_its_check_red = noticed(
    FAULTS, on_ranks, RankError, match="AssertionError", **trio
)
