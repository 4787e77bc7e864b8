"""Scatter/gather: tensor-parallel ranks, which have the same x, send the next stage a part each.

    stage 0, 2 tensor-parallel ranks                       stage 1
        tp 0   x = | a b | c d |    ── a b ─────────▶    | a b | . . | ╲ all-gather   | a b | c d |
        tp 1   x = | a b | c d |    ──────── c d ──▶    | . . | c d | ╱ over tp      | a b | c d |

Sent whole, x goes t times over the slow wires between the stages; so each rank sends a part to the
rank of the same tp index, and the parts are gathered over the wires inside a node. Gradients go
back likewise. A part is a range of x lying flat, so any shape is cut.

    travels     b s h / t elements a boundary, direction, micro-batch and rank, instead of b s h;
                and an all-gather over tp where it arrives: b s h (t-1)/t (bus bytes)

Legend: b rows of a micro-batch, s positions, h width, t tensor-parallel ranks.
Source: Narayanan et al., arXiv 2104.04473, section 4.1.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from labkit import events
from labkit.comm import Comm
from labkit.parallel.common.ownership import marks_of
from labkit.parallel.common.shards import Shard, check_same


class ScatterGather:
    """How the message of each rank of `comm`, the same on all, travels in parts."""

    def __init__(self, comm: Comm):
        self.comm = comm

    def own_part(self, x: Tensor, what: str) -> Tensor:
        """What this rank sends of x [rows, ...]: its range, flat. A view, where x lies flat.

        Raises ValueError, naming `what`, where calls are compared (`World(check=True)`) and x is
        not the same on all."""
        advice = "scatter_gather sends a part of each and needs them equal to the bit"
        check_same(self.comm, what, lambda: [x], advice)
        return self.room(x.contiguous())

    def parts(self, whole: Tensor) -> Sequence[Tensor]:
        """The ranges of a contiguous tensor, one for each rank; views, [numel / t]."""
        return whole.view(-1).split(events.chunk_sizes(whole.numel(), self.comm.size))

    def room(self, whole: Tensor) -> Tensor:
        """This rank's part of `whole`, a view."""
        return self.parts(whole)[self.comm.rank]

    def gather(self, whole: Tensor) -> None:
        """Fill `whole`, of which this rank's part has arrived, with those of the others."""
        parts = list(self.parts(whole))
        self.comm.all_gather(parts, parts[self.comm.rank])


def scatter_gather_over(
    comm: Comm | None, pipeline: Comm, stages: Iterable[nn.Module]
) -> ScatterGather | None:
    """That of `comm`, as `mesh.tp`; None where it is None or one rank. All ranks of `pipeline` call
    it, with their own stages.

    Raises ValueError, on all of them, where some rank gave other ranks to it, where those have
    different parts of what travels, or where stages are cut over others."""
    comm = None if comm is None else Comm.of(comm)
    own = "not given" if comm is None else f"rank {comm.rank} of {comm.size}"
    wrong = _wrong(comm, pipeline, list(stages)) if comm is not None and comm.size > 1 else ""
    every = pipeline.all_gather_object((own, wrong))
    for rank, (_, wrong) in enumerate(every):
        if wrong:
            raise ValueError(f"scatter_gather, stage of rank {rank}: {wrong}")
    for rank, (place, _) in enumerate(every):
        if place != every[0][0]:
            raise ValueError(
                f"scatter_gather is {place} on rank {rank} of the pipeline and {every[0][0]} on "
                "rank 0; a part goes to the rank of the same index: give mesh.tp of one "
                "Mesh(pp=..., tp=...) on every rank"
            )
    return ScatterGather(comm) if comm is not None and comm.size > 1 else None


def _wrong(comm: Comm, pipeline: Comm, stages: Sequence[nn.Module]) -> str:
    """Why these ranks do not have the same tensor to send."""
    ranks = list(comm.ranks)
    if len({*ranks} & {*pipeline.ranks}) > 1:
        return (
            f"ranks {ranks} have other stages of this pipeline, and not the same one; give mesh.tp"
        )
    for stage in stages:
        for path, part in stage.named_modules():
            over = getattr(getattr(part, "comm", None), "ranks", ())
            if getattr(part, "sequence", False) is True and list(over) == ranks:
                return (
                    f"{path} is cut along the sequence (sequence=True), so each rank has a part of "
                    "its own, 1/t of x, and that is all it sends; leave scatter_gather out"
                )
        marks = [mark for p in stage.parameters() for mark in marks_of(p)]
        for over in (list(mark.comm.ranks) for mark in marks if isinstance(mark, Shard)):
            if over != ranks:
                return f"parameters are cut over ranks {over}, and it is over {ranks}; give mesh.tp"
        others = [mark.comm.ranks for mark in marks if not isinstance(mark, Shard)]
        if any(len({*over} & {*ranks}) > 1 for over in others):
            return f"ranks {ranks} have parts of one sequence (context_parallel); leave it out"
    return ""
