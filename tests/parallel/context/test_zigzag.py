"""Zig-zag shards: each token once, the same work for all, there and back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from labkit import Comm
from labkit.parallel.context import zigzag
from labkit.parallel.context.zigzag import gather_sequence, positions_of, sequence_shard
from tables import cases, raises
from worlds import on_each_rank


def of(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=rank, size=size)


def test_a_rank_has_an_early_chunk_and_a_late_one() -> None:
    shards = [positions_of(12, of(rank, 3)).tolist() for rank in range(3)]
    assert shards == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [1, 5])
def test_queries_of_all_ranks_see_as_many_keys(ranks: int, chunk: int) -> None:
    length = 2 * ranks * chunk
    seen = [(positions_of(length, of(rank, ranks)) + 1).sum() for rank in range(ranks)]
    assert set(map(int, seen)) == {length * (length + 1) // 2 // ranks}
    if ranks > 1:
        contiguous = (torch.arange(length).chunk(ranks)[-1] + 1).sum()
        assert contiguous > seen[0], "which is why"


@pytest.mark.parametrize(("ranks", "length"), [(1, 7), (2, 8), (3, 6), (4, 40)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shards_make_the_whole(ranks: int, length: int, dim: int) -> None:
    shape = [3, 5, 2]
    shape[dim] = length
    x = torch.randn(shape)
    shards = zigzag.split_zigzag(x, ranks, dim)
    assert all(torch.equal(shards[r], sequence_shard(x, of(r, ranks), dim)) for r in range(ranks))
    assert torch.equal(zigzag.join_zigzag(shards, dim), x)


def test_tokens_targets_and_positions_are_cut_alike() -> None:
    x = torch.arange(40).reshape(2, 20)
    for rank in range(2):
        assert torch.equal(sequence_shard(x, of(rank, 2)), x[:, positions_of(20, of(rank, 2))])


def test_a_shard_has_a_gradient() -> None:
    x = torch.zeros(8, requires_grad=True)
    sequence_shard(x, of(1, 2), dim=0).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


@cases((10, 2, "8 or 12"), (3, 4, "8 or 16"), (0, 2, "4 or 8"))
def test_a_length_that_does_not_split_is_refused(length: int, ranks: int, would: str) -> None:
    words = f"{length} tokens do.* {2 * ranks} equal.*{would}"
    raises(words, sequence_shard, torch.zeros(1, length), of(0, ranks))
    raises(words, positions_of, length, of(0, ranks))


@on_each_rank("world2")
def test_the_whole_is_gathered() -> None:
    x = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(0))
    shard = sequence_shard(x.transpose(0, 1), Comm(), dim=0).transpose(0, 1)  # not contiguous
    assert torch.equal(gather_sequence(shard, Comm()), x)
