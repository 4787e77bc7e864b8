"""The parameters of a bucket under ZeRO-1 and 2, and this rank's share of them.

Parameters a, b and c, of 6, 2 and 3 elements, on 3 ranks, as rank 1 has them:

    flat         a a a a a a b b c c c .    whole on every rank, and padded; the parameters' memory
    whose        0 0 0 0 1 1 1 1 2 2 2 2
    share                a a b b            rank 1's, a view of flat
    stepped              a a b b            what rank 1 steps on: the share itself; of a bf16 share
                                            an fp32 master copy, which `gather` rounds
    stand_ins           [a a|b b]           views of stepped, one for each piece of a parameter: the
                                            optimizer has these as parameters
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from labkit.comm import Comm, Handle
from labkit.parallel.common.flat import FlatPartition
from labkit.precision.shadow_optimizer import LOW, fp32_of, sync_master_from_param


class ParamShare:
    """`parameters` in one flat memory, in which this rank's share is stepped on and gathered."""

    def __init__(self, parameters: Sequence[torch.Tensor], comm: Comm):
        self.parameters, self.comm = list(parameters), comm
        self.layout = FlatPartition([p.shape for p in parameters], comm.size)
        first = parameters[0]
        self.flat = torch.zeros(self.layout.padded, dtype=first.dtype, device=first.device)
        for p, view in zip(parameters, self.layout.views(self.flat), strict=True):
            view.copy_(p.detach())
            p.data = view
        comm.broadcast(self.flat)
        self.share = self.layout.share_of(self.flat, comm.rank)
        self.pieces = list(self.layout.pieces(comm.rank))
        self.owners_of_pieces = [self.parameters[piece.index] for piece in self.pieces]
        self.low = first.dtype in LOW
        self.stepped = fp32_of(self.share)  # the share itself, or its master copy
        self.stand_ins = [
            nn.Parameter(self.stepped[piece.at : piece.at + piece.numel]) for piece in self.pieces
        ]
        self._versions = [p._version for p in self.parameters]
        self._gathering: Handle | None = None

    def has(self, p: torch.Tensor) -> bool:
        """Whether `p` still lies where it was put."""
        return (
            p.untyped_storage()._cdata == self.flat.untyped_storage()._cdata
            and p.dtype == self.flat.dtype
        )

    def gather(self, async_op: bool) -> None:
        """Give all ranks' shares to all; `async_op` does not wait."""
        if self.low:
            self.share.copy_(self.stepped)
        handle = self.comm.all_gather_into_tensor(self.flat, self.share, async_op=async_op)
        self._gathering = handle
        # A backward through the forward of before must be an error, as after any torch optimizer.
        torch.autograd.graph.increment_version(self.parameters)
        self._versions = [p._version for p in self.parameters]

    def wait_for_parameters(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def sync_master_from_param(self) -> None:
        """What was written to a parameter since the last gather, its master takes."""
        if self.low and self._versions != [p._version for p in self.parameters]:
            sync_master_from_param(self.stepped, self.share)


def check_in_place(bucket_of: Mapping[torch.Tensor, ParamShare], names: Mapping[Any, str]) -> None:
    """Raises ValueError, naming the parameter, when one lies elsewhere than in its bucket."""
    for p, name in names.items():
        if p in bucket_of and not bucket_of[p].has(p):
            raise ValueError(
                f"ZeroOptimizer: the memory of {name} is another than when the "
                "optimizer was made (p.data = ..., or module.to(...)); change a model first, "
                "then make its optimizer"
            )
