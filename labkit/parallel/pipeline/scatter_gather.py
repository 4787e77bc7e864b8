"""Scatter/gather: tensor-parallel ranks hold the same x, and each sends the next stage a part of
it.

    stage 0, 2 tensor-parallel ranks                       stage 1
        tp 0   x = | a b | c d |    ── a b ─────────▶    | a b | . . | ╲ all-gather   | a b | c d |
        tp 1   x = | a b | c d |    ──────── c d ──▶    | . . | c d | ╱ over tp      | a b | c d |

Sent whole, x crosses the slow links between nodes t times. Instead, each rank sends a range of the
flattened x, and fast links gather the parts inside the next node; gradients likewise.

    traffic     b s h / t elements per boundary, direction, micro-batch and rank, not b s h; and an
                all-gather over tp on arrival, b s h (t-1)/t (bus bytes)

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
    """Splits a message over tensor-parallel ranks, and gathers it."""

    def __init__(self, comm: Comm):
        self.comm = comm

    def own_part(self, x: Tensor, what: str) -> Tensor:
        """This rank's flat part of x [rows, ...]. In a `World(check=True)`, raises ValueError,
        naming `what`, if x differs between ranks."""
        advice = "scatter_gather sends a part of each and needs them equal to the bit"
        check_same(self.comm, what, lambda: [x], advice)
        return self.room(x.contiguous())

    def parts(self, whole: Tensor) -> Sequence[Tensor]:
        """Each rank's range of a contiguous tensor, a view [numel / t]."""
        return whole.view(-1).split(events.chunk_sizes(whole.numel(), self.comm.size))

    def room(self, whole: Tensor) -> Tensor:
        return self.parts(whole)[self.comm.rank]

    def gather(self, whole: Tensor) -> None:
        """Fill `whole`, which holds this rank's part, with the others' parts."""
        parts = list(self.parts(whole))
        self.comm.all_gather(parts, parts[self.comm.rank])


def scatter_gather_over(
    comm: Comm | None, pipeline: Comm, stages: Iterable[nn.Module]
) -> ScatterGather | None:
    """ScatterGather over `comm`; None for None or one rank. All ranks of `pipeline` call it, and
    all raise ValueError if comms differ, or the ranks of one do not hold the same messages."""
    comm = None if comm is None else Comm.of(comm)
    own = "not given" if comm is None else f"rank {comm.rank} of {comm.size}"
    wrong = _mismatch(comm, pipeline, list(stages)) if comm is not None and comm.size > 1 else ""
    every = pipeline.all_gather_object((own, wrong))
    for rank, (_, wrong) in enumerate(every):
        if wrong:
            raise ValueError(f"scatter_gather, stage of rank {rank}: {wrong}")
    for rank, (place, _) in enumerate(every):
        if place != every[0][0]:
            raise ValueError(
                f"scatter_gather is {place} on rank {rank} of the pipeline, but {every[0][0]} on "
                "rank 0; parts go to the rank with the same index, so pass mesh.tp of one "
                "Mesh(pp=..., tp=...) on every rank"
            )
    return ScatterGather(comm) if comm is not None and comm.size > 1 else None


def _mismatch(comm: Comm, pipeline: Comm, stages: Sequence[nn.Module]) -> str:
    """Why these ranks do not hold the same tensor to send."""
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
