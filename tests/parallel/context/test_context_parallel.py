"""Context parallelism on real ranks: exact, balanced, hidden, linear, and to the byte."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import context_checks as checks
from labkit import DDP, Comm, RankError, World, dry_run, listen
from labkit.memory.edits import Recompute
from labkit.memory.flash_attention import FlashAttention
from labkit.models import GPT, PlainAttention
from labkit.models.attention import CausalAttention
from labkit.parallel.context import ring_attention as ring
from labkit.parallel.context import ulysses
from labkit.parallel.context.context_parallel import context_parallel
from labkit.parallel.context.zigzag import gather_sequence, positions_of, sequence_shard
from labkit.precision.autocasting import autocast
from small_models import Custom
from tables import raises
from worlds import on_each_rank

WAYS = ["ring", "ulysses"]
SIZES = [1, 2, 3, 4]


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_equal_full_attention(worlds: Any, way: str, ranks: int) -> None:
    check = partial(worlds(ranks).run, checks.attention_is_exact, way)
    check(12, 12, 48)
    check(24, 12, 24, strided=False)
    check(12, 12, 2 * ranks)  # a chunk is one token
    if ranks == 1:
        check(4, 2, 7)  # takes any length
    if way == "ring":
        check(2, 2, 48, scale=200.0)  # large scores do not overflow
        for heads, groups in ((5, 5), (6, 1), (4, 2)):  # it takes any
            check(heads, groups, 24)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
@pytest.mark.parametrize("way", WAYS)
def test_two_byte_types_are_off_by_rounding_only(
    worlds: Any, way: str, dtype: torch.dtype, limit: float
) -> None:
    worlds(4).run(checks.attention_is_exact, way, 8, 4, 96, dtype, limit)


@on_each_rank("world2")
def test_products_inside_a_region_of_autocast_are_fp32() -> None:
    mine = checks.shards(checks.some(4, 2, 32, torch.float32))
    plain = ring.ring_attention(*mine[:3], Comm())
    for region in (autocast(torch.bfloat16), torch.autocast("cpu", torch.bfloat16)):
        with region:
            assert torch.equal(plain, ring.ring_attention(*mine[:3], Comm()))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_weights_equal_one_process(worlds: Any, recompute: Any, way: str, ranks: int) -> None:
    worlds(ranks).run(checks.training_equals_one_process, way, "ddp", recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["zero-1", "zero-2", "zero-3"])
def test_sharders_go_around_it_unchanged(worlds: Any, strategy: str, way: str, ranks: int) -> None:
    worlds(ranks).run(checks.training_equals_one_process, way, strategy)
    worlds(ranks).run(checks.training_equals_one_process, way, strategy, recompute="full")


def test_an_untied_model_with_one_key_value_head(worlds: Any) -> None:
    worlds(2).run(checks.training_equals_one_process, "ring", kv_heads=1, tied=False)


@pytest.mark.parametrize("way", WAYS)
@on_each_rank("world4")
def test_frozen_parameters_and_a_block_used_twice(way: Any) -> None:
    comm = Comm()
    torch.manual_seed(0)
    module = GPT(31, 24, 2, 4, 16).double()
    module.embed.requires_grad_(False)  # and so the head, which is tied
    module.blocks[0].attn.k.requires_grad_(False)
    module.blocks[1] = Custom(lambda m, x: m.block(m.block(x)), block=module.blocks[1])
    alone = copy.deepcopy(module)
    model = DDP(context_parallel(module, comm, way=way), comm)
    tokens = torch.randint(31, (2, 17), generator=torch.Generator().manual_seed(1))
    x, y = (sequence_shard(t, comm) for t in (tokens[:, :-1], tokens[:, 1:]))
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    F.cross_entropy(alone(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (module, alone))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_ranks_read_their_own_positions(worlds: Any) -> None:
    def logits() -> None:
        comm = Comm()
        torch.manual_seed(0)
        module = GPT(31, 24, 1, 4, 24).double()
        tokens = torch.randint(31, (2, 24))
        with torch.no_grad():
            expected = module(tokens)
            context_parallel(module, comm)
            x, where = sequence_shard(tokens, comm), positions_of(24, comm)
            for found in (
                module(x), module(tokens=x), module(x, None), module(x, positions=None),
                module(x, where), module(x, positions=where),
            ):  # fmt: skip
                whole = gather_sequence(found, comm)
                torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-12)
            wrong = module(x, torch.arange(x.shape[1]))
            assert comm.size == 1 or not torch.allclose(gather_sequence(wrong, comm), expected)

    for ranks in SIZES:
        worlds(ranks).run(logits)


@on_each_rank("world2")
def test_ulysses_takes_the_models_own_core() -> None:
    whole = checks.some(4, 2, 16)
    expected = F.scaled_dot_product_attention(*whole[:3], is_causal=True, enable_gqa=True)
    for core in (CausalAttention(0.0), PlainAttention(), FlashAttention(tile=3)):
        found = ulysses.Ulysses(core, Comm())(*checks.shards(whole)[:3])
        assert (gather_sequence(found, Comm(), dim=2) - expected).abs().max() < 1e-12


@on_each_rank("world2")
def test_dropout_inside_ulysses_is_of_each_rank_and_the_same_again() -> None:
    """Other masks for the heads of other ranks; in backward, computed again, those of forward."""
    comm, grads = Comm(), []
    for recompute in (False, True):
        torch.manual_seed(0)
        model: Any = GPT(31, 24, 2, 4, 16, dropout=0.5).double()
        context_parallel(model, comm, way="ulysses")
        if recompute:
            Recompute(model)
        torch.manual_seed(comm.rank)
        model(torch.zeros(2, 8, dtype=torch.long)).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*grads)
    ones = [torch.ones(1, 4, 8, 2, dtype=torch.float64) for _ in range(3)]
    first, second = comm.all_gather_object(model.blocks[0].attn.core(*ones)[:, ::2].sum().item())
    assert first != second


@on_each_rank("world2")
def test_under_autocast_blocks_travel_in_two_bytes() -> None:
    comm = Comm()
    torch.manual_seed(0)
    model = GPT(31, 24, 1, 4, 16)
    tokens = torch.randint(31, (2, 16))
    with torch.no_grad():
        expected = sequence_shard(model(tokens), comm)
    context_parallel(model, comm)
    with listen() as events:
        with autocast(torch.bfloat16):
            found = model(sequence_shard(tokens, comm))
        forward = sum(event.bus_bytes for event in events)
        found.float().square().sum().backward()
    assert (found - expected).abs().max() < 2**-6 * expected.abs().max()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    block = 2 * 2 * 4 * 8 * 6  # k and v of 2 rows, 4 heads, 8 tokens, 6 elements
    assert forward == 2 * block
    assert sum(event.bus_bytes for event in events) - forward == (2 + 4) * block


@pytest.mark.slow
def test_a_dry_run_reads_no_values() -> None:
    def train(way: Any) -> None:
        comm = Comm()
        model = GPT(64, 256, 1, 16, 2048)
        before = set(model.state_dict())
        context_parallel(model, comm, way=way)
        assert set(model.state_dict()) == before, "checkpoints are what they were"
        wrapped = DDP(model, comm)
        optimizer = torch.optim.AdamW(wrapped.parameters())
        wrapped(torch.zeros(1, 2048 // comm.size, dtype=torch.long)).sum().backward()
        optimizer.step()

    for way, op in (("ring", "ring_exchange"), ("ulysses", "all_to_all")):
        assert op in {event.op for event in dry_run(train, way, ranks=16, step=0).ranks[0].comms}


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_predicted(worlds: Any, way: str, ranks: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        worlds(ranks).run(checks.bytes_are_those_predicted, way, dtype)


@pytest.mark.parametrize("ranks", SIZES)
def test_every_rank_computes_as_much_while_blocks_travel(worlds: Any, ranks: int) -> None:
    worlds(ranks).run(checks.every_rank_computes_as_much)
    if ranks > 1:
        worlds(ranks).run(checks.blocks_travel_while_the_rank_computes)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_memory_is_linear_in_the_shard(worlds: Any, ranks: int) -> None:
    worlds(ranks).run(checks.memory_is_linear_in_the_shard)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_recompute_sends_what_forward_sends_once_more(worlds: Any, way: Any, ranks: int) -> None:
    """The core alone stops before its result: of Ulysses' four all-to-alls it repeats three."""

    def sent(recompute: str | None) -> list[int]:
        comm = Comm()
        torch.manual_seed(0)
        model = context_parallel(GPT(31, 24, 2, 12, 24), comm, way=way)
        if recompute:
            Recompute(model, what=recompute)
        counts = []
        x = sequence_shard(torch.zeros(1, 24, dtype=torch.long), comm)
        with listen() as events:
            loss = model(x).sum()
            counts.append(len(events))
            loss.backward()
        return [*counts, len(events) - counts[0]]

    each, back, core = (ranks - 1, 2 * (ranks - 1), ranks - 1) if way == "ring" else (4, 4, 3)
    for recompute, again in ((None, 0), ("full", each), ("selective", core)):
        assert worlds(ranks).run(sent, recompute) == [[2 * each, 2 * (back + again)]] * ranks


@on_each_rank("world4")
def test_bad_input_says_what_would_do() -> None:
    comm = Comm()

    def gpt(**sizes: Any) -> GPT:
        return GPT(**{**dict(vocab=8, width=12, depth=1, heads=6, context=64), **sizes})

    def edit(model: Any, way: Any = "ring") -> Any:
        return lambda: context_parallel(model, comm, way=way)

    tokens = torch.zeros(1, 64, dtype=torch.long)
    edited, recomputed, untouched = context_parallel(gpt(), comm), gpt(), gpt(dropout=0.1)
    Recompute(recomputed, what="selective")
    core = ring.RingAttention(comm)
    q = torch.zeros(1, 2, 5, 4)
    for call, message in (
        (lambda: sequence_shard(tokens[:, :50], comm), "a sequence of 50 tokens does not split "
         "into 8 equal chunks, two for each of 4 context-parallel ranks; choose a length that "
         "does, such as 48 or 56"),
        (lambda: positions_of(5, comm), "choose a length that does, such as 8 or 16"),
        (lambda: edited(tokens[:, :3]), "a sequence of 12 tokens does not split into 8 equal"),
        (lambda: core(q, q, q), "a sequence of 20 tokens does not split into 8 equal chunks"),
        (lambda: core(q, q[:, :1], q), "do not fit together"),
        (lambda: edited(tokens), "4 shards of 64 tokens make a sequence of 256, longer than the "
         "model's context of 64; pass sequence_shard(tokens, comm) on each rank, not all tokens"),
        (edit(edited, "ulysses"), "already context-parallel"),
        (edit(gpt(), "ulysses"), "Ulysses: 6 heads are not divisible by 4 context-parallel ranks; "
         'use 1 or 2 or 3 or 6, or way="ring", which takes any number of heads'),
        (edit(gpt(heads=12, kv_heads=3), "ulysses"), "3 key-value heads are not divisible by 4 "
         "context-parallel ranks; use 1 or 3"),
        (edit(untouched), 'way="ring" supports no dropout in attention, but this model has p=0.1'),
        (edit(recomputed), "call context_parallel first, then Recompute"),
        (edit(nn.Linear(2, 2)), "Linear has no module attn.core"),
        (edit(DDP(gpt())), "edit the plain model first, then wrap it"),
        (edit(gpt(), "rings"), 'choose "ring" or "ulysses"'),
    ):  # fmt: skip
        raises((message,), call)
    assert isinstance(untouched.blocks[0].attn.core, CausalAttention)


def test_ranks_with_different_lengths_are_reported(worlds: Any) -> None:
    def differ() -> None:
        x = torch.zeros(1, 2, 4 + 2 * Comm().rank, 4)
        ring.ring_attention(x, x, x, Comm())

    with World(2, timeout_s=10) as pair:
        raises("ring_exchange", pair.run, differ, error=RankError)
