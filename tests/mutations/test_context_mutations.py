"""Deliberate faults in context parallelism; each must turn its check red.

A fault is another line of source: the module runs again with it, inside the ranks, in its own
namespace, and those who imported one of its names get the new one.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import context_checks as checks
from labkit import RankError, World

pytestmark = pytest.mark.slow

PARTS = "labkit.parallel.context."


@pytest.fixture(scope="module")
def trio() -> Iterator[World]:
    with World(3, timeout_s=5) as world:  # some of the faults let ranks wait for each other
        yield world


def with_fault(module: str, line: str, fault: str, check: Callable[..., None], *args: Any) -> str:
    """On a rank: run `check` where `line` of the module is replaced, and say what it says."""
    there = importlib.import_module(PARTS + module)
    source = inspect.getsource(there)
    assert line in source, f"{line!r} is no line of {module} any more"
    before = dict(vars(there))
    users = [m for name, m in sys.modules.items() if name.startswith("labkit.parallel.")]
    try:
        exec(compile(source.replace(line, fault), there.__file__ or "", "exec"), vars(there))
        _swap([*users, checks], before, vars(there))
        check(*args)
        return "green"
    except AssertionError as error:
        return str(error)
    finally:
        _swap([*users, checks], dict(vars(there)), before)
        vars(there).update(before)


def _swap(users: list[Any], old: dict[str, Any], new: dict[str, Any]) -> None:
    for user in users:
        for name, thing in list(vars(user).items()):
            if not name.startswith("__") and name in old and thing is old[name]:
                setattr(user, name, new[name])


EXACT = (checks.attention_is_exact, "ring", 4, 2, 48)
ULYSSES = (checks.attention_is_exact, "ulysses", 6, 3, 24)
TRAINED = (checks.training_equals_one_process, "ring")
BYTES = (checks.bytes_are_those_predicted, "ring")
OVERLAP = (checks.blocks_travel_while_the_rank_computes,)
BALANCE = (checks.every_rank_computes_as_much,)
MEMORY = (checks.memory_is_linear_in_the_shard,)

FAULTS: dict[str, tuple[str, str, str, tuple[Any, ...]]] = {
    "results are added, not merged": (
        "ring_attention", "    out *= torch.exp(logsum - both).unsqueeze(-1)\n", "", EXACT,
    ),
    "a merged row keeps its old sum": (
        "ring_attention", "    logsum.copy_(both)\n", "", EXACT,
    ),
    "a rank after is seen by all queries": (
        "ring_attention", "(slice(half, length), every, False)", "(every, every, False)", EXACT,
    ),
    "early and late half are swapped": (
        "ring_attention", "(every, slice(0, half), False)", "(every, slice(half, length), False)",
        EXACT,
    ),
    "the own block is not causal": (
        "ring_attention", "return every, every, True", "return every, every, False", EXACT,
    ),
    "a block's owner is miscounted": (
        "ring_attention", "(comm.rank - step) % comm.size", "(comm.rank + step) % comm.size", EXACT,
    ),
    "a block's gradient is left with the others": (
        "ring_attention", "            at_home += arriving\n", "            pass\n", EXACT,
    ),
    "what the ranks before have found is lost": (
        "ring_attention", "grown, arriving = arriving, torch.empty_like(at_home)",
        "grown, arriving = torch.zeros_like(at_home), torch.empty_like(at_home)", EXACT,
    ),
    "gradients of one process, not of all": (
        "ring_attention", "grown[:, :, :, keys] += torch.stack(dkv)",
        "grown[:, :, :, keys] += 0 * torch.stack(dkv)", TRAINED,
    ),
    "the block is waited for before it is computed with": (
        "ring_attention", "        yield (comm.rank - step) % comm.size, block\n"
        "        assert handle is not None\n        handle.wait()\n",
        "        assert handle is not None\n        handle.wait()\n"
        "        yield (comm.rank - step) % comm.size, block\n", OVERLAP,
    ),
    "gradients are sent and waited for": (
        "ring_attention", "handle = comm.ring_exchange(arriving, grown, async_op=True)",
        "handle = comm.ring_exchange(arriving, grown, async_op=True); handle.wait()", OVERLAP,
    ),
    "a block makes the whole round": (
        "ring_attention", "for step in range(comm.size - 1):\n        arriving",
        "for step in range(0 if (comm.ring_exchange(torch.empty_like(block), block)) else "
        "comm.size - 1):\n        arriving", BYTES,
    ),
    "scores are computed, then masked": (
        "ring_attention", "    if owner == rank:\n        return every",
        "    if owner <= rank:\n        return every", BALANCE,
    ),
    "all blocks are kept for backward": (
        "ring_attention", "ctx.save_for_backward(q, k, v, out, logsum)",
        "ctx.save_for_backward(q, k, v, out, logsum, block)", MEMORY,
    ),
    "memory of a square": (
        "ring_attention", "        out = out.to(q.dtype)\n",
        "        _ = queries @ queries.transpose(2, 3)\n        out = out.to(q.dtype)\n", MEMORY,
    ),
    "tokens of a head are in the order of the ranks": (
        "zigzag", "return torch.cat([*early, *reversed(late)], dim)",
        "return torch.cat([*early, *late], dim)", ULYSSES,
    ),
    "shards are contiguous": (
        "zigzag", "[chunks[r], chunks[2 * ranks - 1 - r]]", "[chunks[2 * r], chunks[2 * r + 1]]",
        EXACT,
    ),
    "heads come back in another order": (
        "ulysses", "return torch.cat(arriving, dim=1)", "return torch.cat(arriving[::-1], dim=1)",
        ULYSSES,
    ),
    "the gradient is not brought back": (
        "ulysses", "to_sequence, to_heads, self.comm)",
        "to_sequence, lambda dx, comm: to_heads(dx * 0 + dx.sum(), comm), self.comm)", ULYSSES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_its_check_red(trio: World, fault: str) -> None:
    module, line, instead, (check, *args) = FAULTS[fault]
    said = trio.run(with_fault, module, line, instead, check, *args)
    assert said != ["green"] * 3


def test_without_a_fault_they_are_green(trio: World) -> None:
    for check, *args in (EXACT, ULYSSES, BYTES, OVERLAP, BALANCE):
        said = trio.run(with_fault, "zigzag", "def split", "def split", check, *args)
        assert said == ["green"] * 3


def test_positions_left_out_turn_the_weights_red(trio: World) -> None:
    def unfilled() -> None:
        real = checks.context._PositionsFilledIn
        checks.context._PositionsFilledIn = lambda *_: lambda *_: None  # type: ignore[assignment,misc]
        try:
            checks.training_equals_one_process("ring")
        finally:
            checks.context._PositionsFilledIn = real  # type: ignore[misc]

    with pytest.raises(RankError, match="weights are off by"):
        trio.run(unfilled)
