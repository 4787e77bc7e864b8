"""The vocabulary cut over 1 to 4 ranks, also where it does not divide: embedding, head and loss."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vocab_checks
from labkit import Comm, World, dry_run, listen, recompute
from labkit.parallel.common.shards import shard_of
from labkit.parallel.tensor import layers
from labkit.parallel.tensor.layers import VocabParallelEmbedding, VocabParallelHead
from shard_cases import joined
from tables import cases, raises
from vocab_checks import Tiny, own_logits
from worlds import on_each_rank, world_fixture

vocab_parallel_cross_entropy = layers.vocab_parallel_cross_entropy
VOCABS = (8, 10, 5)  # on 4 ranks: no padding; 3, 3, 3, 1 rows; 2, 2, 1, 0 rows
world = world_fixture(sizes=[1, 2, 3, 4], timeout_s=20)


CHECKS = [
    vocab_checks.embedding_is_torchs,
    vocab_checks.loss_is_torchs,
    vocab_checks.tied_weights_train_as_one,
    vocab_checks.bytes_are_the_formulas,
    vocab_checks.sequence_parts_are_torchs,
]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("check", CHECKS)
def test_it_is_torchs(world: World, check: Any, vocab: int) -> None:
    world.run(check, layers, vocab)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("gather", [True, False])
def test_the_head_is_torchs(world: World, vocab: int, gather: bool) -> None:
    world.run(vocab_checks.head_is_torchs, layers, vocab, gather)


@on_each_rank("world")
def test_the_same_seed_gives_the_same_weights_on_any_number_of_ranks() -> None:
    torch.manual_seed(1)
    table, linear = nn.Embedding(7, 3), nn.Linear(3, 7)
    torch.manual_seed(1)
    comm = Comm()
    embedding, head = VocabParallelEmbedding(7, 3, comm), VocabParallelHead(3, 7, comm, bias=True)
    parts = [embedding.weight, head.weight, head.bias]
    assert shard_of(head.weight) == shard_of(head.bias) == shard_of(embedding.weight) is not None
    for part, whole in zip(parts, (table.weight, linear.weight, linear.bias), strict=True):
        assert torch.equal(joined(part, shard_of(part)), whole)


def test_huge_logits_do_not_overflow(world: World) -> None:
    """exp(1e4) is infinite in every dtype; the highest logit is taken off before."""
    world.run(vocab_checks.loss_is_torchs, layers, 10, 1e4)


@on_each_rank("world4")
def test_a_rank_whose_logits_are_far_below_the_others_adds_nothing() -> None:
    comm = Comm()
    whole = torch.zeros(1, 8) + torch.tensor([1e30, 1e30, 0, 0, -1e30, -1e30, -math.inf, 0])
    y = torch.tensor([1])
    found = vocab_parallel_cross_entropy(own_logits(whole, comm), y, comm)
    assert abs(float(found - F.cross_entropy(whole, y))) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_each_rank("world4")
def test_two_byte_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    comm = Comm()
    torch.manual_seed(2)
    whole = (torch.randn(40, 1000) * 3).to(dtype)
    y = torch.randint(0, 1000, (40,))
    there = whole.clone().requires_grad_()
    here = own_logits(whole, comm).clone().requires_grad_()
    expected = F.cross_entropy(there.float(), y)
    with listen() as events:
        loss = vocab_parallel_cross_entropy(here, y, comm)
    assert loss.dtype == torch.float32 and {e.dtype for e in events} == {"float32"}
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    expected.backward()
    loss.backward()
    assert here.grad is not None and there.grad is not None and here.grad.dtype == dtype
    torch.testing.assert_close(here.grad, there.grad.chunk(4, -1)[comm.rank], rtol=0.01, atol=1e-7)


@on_each_rank("world4")
def test_the_embedding_of_two_byte_rows_is_exact() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, dtype=torch.bfloat16)
    tokens = torch.arange(10).unsqueeze(0)
    assert torch.equal(VocabParallelEmbedding.from_embedding(table, Comm())(tokens), table(tokens))


@on_each_rank("world2")
def test_one_row_that_is_not_a_number_stays_with_its_token() -> None:
    table = nn.Embedding(4, 2)
    with torch.no_grad():
        table.weight[2] = math.nan  # row 0 of rank 1, where it looks up others' tokens
    x = VocabParallelEmbedding.from_embedding(table, Comm())(torch.tensor([[0, 1, 3]]))
    assert bool(x.isfinite().all())


@on_each_rank("world2")
def test_padding_idx_never_learns_and_a_frozen_table_stays_frozen() -> None:
    table = nn.Embedding(5, 2, padding_idx=-2)  # row 3, on rank 1
    tokens = torch.tensor([[0, 3, 4, 3]])
    with torch.no_grad():
        table.weight[3] = 7.0
    cut = VocabParallelEmbedding.from_embedding(table, Comm())
    table(tokens).sum().backward()
    x = cut(tokens)
    assert torch.equal(x, table(tokens))
    x.sum().backward()
    assert torch.equal(cut.weight.grad, vocab_checks.own_rows(table.weight.grad, Comm()))
    cut = VocabParallelEmbedding.from_embedding(nn.Embedding(5, 2).requires_grad_(False), Comm())
    assert not cut.weight.requires_grad and not cut(tokens).requires_grad


@on_each_rank("world2")
def test_a_module_used_twice_under_recompute() -> None:
    torch.manual_seed(0)
    plain, comm = Tiny(5).double(), Comm()
    embedding = VocabParallelEmbedding.from_embedding(plain.tokens, comm)
    head = VocabParallelHead.from_linear(plain.head, comm, gather_output=False)
    tokens = torch.tensor([[0, 4, 2, 1]])

    def twice(x: torch.Tensor) -> torch.Tensor:
        logits = head(embedding(x) * embedding(x.flip(1)))
        return vocab_parallel_cross_entropy(logits, x, comm)

    recompute(twice, tokens).backward()
    x = plain.tokens(tokens) * plain.tokens(tokens.flip(1))
    weight = plain.head.weight.detach().clone().requires_grad_()
    F.cross_entropy((x @ weight.t()).flatten(0, 1), tokens.flatten()).backward()
    for cut, whole in ((embedding.weight, plain.tokens.weight), (head.weight, weight)):
        vocab_checks.near(cut.grad, vocab_checks.own_rows(whole.grad, comm), "a gradient")


@on_each_rank("world2")
def test_nothing_counts() -> None:
    """As in torch: the mean of no targets is no number, their sum is 0; no tokens, no error."""
    comm = Comm()
    logits, y = torch.randn(3, 2), torch.full((3,), -100)
    mean = vocab_parallel_cross_entropy(logits, y, comm)
    none = vocab_parallel_cross_entropy(logits[:0], y[:0], comm, reduction="sum")
    total = vocab_parallel_cross_entropy(logits, y, comm, reduction="sum")
    assert bool(mean.isnan()) and float(none + total) == 0.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@on_each_rank("world2")
def test_targets_of_any_integers(dtype: torch.dtype) -> None:
    comm = Comm()
    torch.manual_seed(0)
    whole, y = torch.randn(6, 10, dtype=torch.float64), torch.randint(0, 10, (6,))
    found = vocab_parallel_cross_entropy(own_logits(whole, comm), y.to(dtype), comm)
    assert abs(float(found - F.cross_entropy(whole, y))) < 1e-12


@on_each_rank("world2")
def test_under_autocast_the_loss_is_still_in_float32() -> None:
    comm = Comm()
    torch.manual_seed(0)
    plain = Tiny(10)
    head = VocabParallelHead.from_linear(plain.head, comm, gather_output=False)
    x, y = torch.randn(2, 6, 3), torch.randint(0, 10, (2, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, expected = head(x), plain.head(x)
        loss = vocab_parallel_cross_entropy(logits, y, comm)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    right = F.cross_entropy(expected.float().flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss, right, rtol=1e-6, atol=0)
    loss.backward()
    right.backward()
    own = vocab_checks.own_rows(plain.head.weight.grad, comm)
    torch.testing.assert_close(head.weight.grad, own, rtol=0.02, atol=1e-3)


def test_it_runs_on_paper() -> None:
    """Nobody looks at a number, so that a vocabulary of any size is recorded without data."""

    def work() -> None:
        comm = Comm()
        model = Tiny(50257)
        model.tokens = VocabParallelEmbedding.from_embedding(model.tokens, comm)
        model.head = VocabParallelHead.from_linear(model.head, comm, gather_output=False)
        model.head.weight = model.tokens.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.zeros(2, 8, dtype=torch.long)
        vocab_parallel_cross_entropy(model(x), x, comm).backward()
        optimizer.step()

    reduced = [event.payload_bytes for event in dry_run(work, ranks=8, step=0).ranks[0].comms]
    assert reduced == [2 * 8 * 3 * 4, 2 * 8 * 4, 2 * 2 * 8 * 4, 2 * 8 * 3 * 4]


def loss_of(y: list[Any], comm: Comm, **how: Any) -> torch.Tensor:
    return vocab_parallel_cross_entropy(torch.ones(1, 3), torch.tensor(y), comm, **how)


def cut_table(comm: Comm, **how: Any) -> VocabParallelEmbedding:
    return VocabParallelEmbedding.from_embedding(nn.Embedding(5, 2, **how), comm)


@cases(
    (lambda c: VocabParallelEmbedding(5, 2, c)(torch.tensor([[0, 5]])), "a token is 5, but"),
    (lambda c: VocabParallelEmbedding(5, 2, c)(torch.tensor([[-1]])), "a token is -1, but"),
    (lambda c: loss_of([6], c), "a target is 6, but valid ids are 0 to 5"),
    (lambda c: loss_of([5], c, vocab=5), "a target is 5, but valid ids are 0 to 4"),
    (lambda c: loss_of([-1], c), "a target is -1"),
    (lambda c: loss_of([1, 2], c), "logits [1, 3] do not fit targets [2]"),
    (lambda c: loss_of([0.5], c), "targets [1] of torch.float32"),
    (lambda c: loss_of([0], c, reduction="max"), "reduction='max'"),
    (lambda c: cut_table(c, max_norm=1.0), "max_norm=1.0"),
    (lambda c: cut_table(c, sparse=True), "sparse=True"),
)
@on_each_rank("world2")
def test_bad_input_is_refused(wrong: Any, words: str) -> None:
    raises((words,), wrong, Comm())
