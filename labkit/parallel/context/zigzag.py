"""Zig-zag shards: rank r holds chunks r and 2n-1-r of 2n, for equal work in causal attention.

    chunk                    0     1     2     3     4     5          n = 3 ranks
    rank                     0     1     2     2     1     0
    visible key chunks       1     2     3     4     5     6          7 in total per rank

Source: Llama Team, arXiv 2407.21783, section 3.3.2. Striped Attention (Brandon et al., arXiv
2311.09431) balances differently: rank r holds every n-th token, starting at r.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.comm import Comm


def sequence_shard(x: Tensor, comm: Comm, dim: int = 1) -> Tensor:
    """This rank's chunks r and 2n-1-r of 2n along `dim` of `x`, which is equal on all ranks:
    [b, s] -> [b, s/n]. Raises ValueError if n > 1 and 2n does not divide the size of `dim`."""
    return split_zigzag(x, comm.size, dim)[comm.rank]


def positions_of(length: int, comm: Comm, device: torch.device | str | None = None) -> Tensor:
    """Positions of this rank's tokens, [length / n]. Raises ValueError as `sequence_shard` does."""
    return sequence_shard(torch.arange(length, device=device), comm, dim=0)


def gather_sequence(x: Tensor, comm: Comm, dim: int = 1) -> Tensor:
    """The inverse of `sequence_shard`: the whole tensor on all ranks. Not differentiable."""
    shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(comm.size)]
    comm.all_gather(shards, x.detach())
    return join_zigzag(shards, dim)


def split_zigzag(x: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Split the whole sequence into all ranks' shards."""
    check_splits(x.shape[dim], ranks)
    chunks = x.tensor_split(2 * ranks, dim)
    return [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]], dim) for r in range(ranks)]


def join_zigzag(shards: Sequence[Tensor], dim: int) -> Tensor:
    """Join all ranks' shards into the whole sequence."""
    early, late = zip(*(shard.tensor_split(2, dim) for shard in shards))
    return torch.cat([*early, *reversed(late)], dim)


def check_splits(length: int, ranks: int) -> None:
    """Raises ValueError unless `length` tokens split into 2 equal chunks per rank."""
    if ranks == 1 or (length > 0 and length % (2 * ranks) == 0):
        return
    below = length // (2 * ranks) * 2 * ranks
    valid = f"{below} or {below + 2 * ranks}" if below else f"{2 * ranks} or {4 * ranks}"
    raise ValueError(
        f"a sequence of {length} tokens does not split into {2 * ranks} equal chunks, two for each "
        f"of {ranks} context-parallel ranks; choose a length that does, such as {valid}"
    )
