"""Ulysses: during attention, heads are sharded instead of the sequence.

                 heads                                     heads
              a  b  c  d                                a  b  c  d
    tokens 0  ▪  ▪  ▪  ▪   rank 0    all-to-all     0   ▪  ▪ │ ░  ░
           1  ▪  ▪  ▪  ▪             ──────────>    1   ▪  ▪ │ ░  ░
           ──────────────                           2   ▪  ▪ │ ░  ░
           2  ░  ░  ░  ░   rank 1    <──────────    3   ▪  ▪ │ ░  ░
           3  ░  ░  ░  ░             all-to-all       rank 0 │ rank 1

With h/n heads and all tokens, a rank can use any attention kernel and dropout. q, k, v and
the result need four all-to-alls in forward and four in backward.

    traffic   (n-1)/n · (2h + 2g) b s/n e elements sent per rank in forward, and again in backward;
              falls with n, unlike the ring's (n-1)/n · 2 b s g e
    limit     h and g must be divisible by n

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509, section 3.
Legend: b rows, h heads, g key-value heads, s tokens per whole sequence, e head width, n ranks.
"""

import torch
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.conjugate import Exchange
from labkit.parallel.context.zigzag import join_zigzag, split_zigzag


class Ulysses(nn.Module):
    """An attention core for inputs sharded over `comm`; runs `core` on all tokens and h/n heads."""

    def __init__(self, core: nn.Module, comm: Comm) -> None:
        super().__init__()
        self.core, self.comm = core, comm

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, h, s/n, e] and k, v [b, g, s/n, e] -> [b, h, s/n, e]. Raises ValueError if heads or
        tokens are not divisible."""
        check_heads(q.shape[1], k.shape[1], self.comm.size)
        q, k, v = (Exchange.apply(x, to_heads, to_sequence, self.comm) for x in (q, k, v))
        return Exchange.apply(self.core(q, k, v), to_sequence, to_heads, self.comm)


def to_heads(x: Tensor, comm: Comm) -> Tensor:
    """All heads, s/n tokens -> h/n heads, all tokens: [b, h, s/n, e] -> [b, h/n, s, e]."""
    leaving = x.chunk(comm.size, dim=1)  # heads per rank
    arriving = [x.new_empty(leaving[0].shape) for _ in leaving]
    comm.all_to_all(arriving, leaving)
    return join_zigzag(arriving, dim=2)  # all ranks' tokens, in order


def to_sequence(x: Tensor, comm: Comm) -> Tensor:
    """The inverse of `to_heads`: [b, h/n, s, e] -> [b, h, s/n, e]."""
    leaving = split_zigzag(x, comm.size, dim=2)
    arriving = [x.new_empty(leaving[0].shape) for _ in leaving]
    comm.all_to_all(arriving, leaving)
    return torch.cat(arriving, dim=1)


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raises ValueError if heads are not divisible by `ranks`; suggests valid rank counts."""
    if heads % ranks == 0 and kv_heads % ranks == 0:
        return
    valid = [n for n in range(1, kv_heads + 1) if heads % n == kv_heads % n == 0]
    what = f"{heads} heads" if heads % ranks else f"{kv_heads} key-value heads"
    raise ValueError(
        f"Ulysses: {what} are not divisible by {ranks} context-parallel ranks; "
        f'use {" or ".join(map(str, valid))}, or way="ring", which takes any number of heads'
    )
