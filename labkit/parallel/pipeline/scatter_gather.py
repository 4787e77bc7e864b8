"""Scatter/gather: tensor-parallel ranks hold the same x, so each rank sends only a slice to the
next stage.

    stage 0, 2 tensor-parallel ranks                       stage 1
        tp 0   x = | a b | c d |    ── a b ─────────▶    | a b | . . | ╲ all-gather   | a b | c d |
        tp 1   x = | a b | c d |    ──────── c d ──▶    | . . | c d | ╱ over tp      | a b | c d |

If sent whole, x would cross the slow links between nodes t times. Instead, each rank sends a slice
of the flattened x, and the next node gathers x over fast links. Gradients are sent the same way.

    traffic     b s h / t elements per boundary, direction, micro-batch and rank (not b s h), plus
                an all-gather over tp on arrival, b s h (t-1)/t elements (bus bytes)

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
    """Splits a message over tensor-parallel ranks, and gathers the slices."""

    def __init__(self, comm: Comm):
        self.comm = comm

    def own_part(self, x: Tensor, what: str) -> Tensor:
        """This rank's flat slice of x [rows, ...]. In a `World(check=True)`, raises a ValueError
        that names `what` if x differs between ranks."""
        advice = "scatter_gather sends one slice per rank, so replicas must be bitwise equal"
        check_same(self.comm, what, lambda: [x], advice)
        return self.own_slice(x.contiguous())

    def parts(self, whole: Tensor) -> Sequence[Tensor]:
        """The slices of a contiguous tensor: one view [numel / t] per rank."""
        return whole.view(-1).split(events.chunk_sizes(whole.numel(), self.comm.size))

    def own_slice(self, whole: Tensor) -> Tensor:
        return self.parts(whole)[self.comm.rank]

    def gather(self, whole: Tensor) -> None:
        """Fill `whole`, which holds this rank's slice, with the slices of the other ranks."""
        parts = list(self.parts(whole))
        self.comm.all_gather(parts, parts[self.comm.rank])


def scatter_gather_over(
    comm: Comm | None, pipeline: Comm, stages: Iterable[nn.Module]
) -> ScatterGather | None:
    """ScatterGather over `comm`; None if `comm` is None or has one rank. All ranks of `pipeline`
    must call this; all raise ValueError if comms differ or their ranks hold different messages."""
    comm = None if comm is None else Comm.of(comm)
    own = "None" if comm is None else f"index {comm.rank} of {comm.size}"
    mismatch = _mismatch(comm, pipeline, list(stages)) if comm and comm.size > 1 else ""
    reports = pipeline.all_gather_object((own, mismatch))
    for rank, (_, mismatch) in enumerate(reports):
        if mismatch:
            raise ValueError(f"scatter_gather, stage of rank {rank}: {mismatch}")
    for rank, (place, _) in enumerate(reports):
        if place != reports[0][0]:
            raise ValueError(
                f"scatter_gather differs: {place} on rank {rank} of the pipeline, {reports[0][0]} "
                "on rank 0; slices are sent to the rank with the same index, so pass mesh.tp of "
                "one Mesh(pp=..., tp=...) on every rank"
            )
    return ScatterGather(comm) if comm is not None and comm.size > 1 else None


def _mismatch(comm: Comm, pipeline: Comm, stages: Sequence[nn.Module]) -> str:
    """Why the ranks of `comm` do not hold the same messages; empty if they do."""
    ranks = list(comm.ranks)
    if len({*ranks} & {*pipeline.ranks}) > 1:
        return (
            f"ranks {ranks} have different stages of this pipeline, not the same one; pass mesh.tp"
        )
    for stage in stages:
        for path, part in stage.named_modules():
            over = getattr(getattr(part, "comm", None), "ranks", ())
            if getattr(part, "sequence", False) is True and list(over) == ranks:
                return (
                    f"{path} is sharded along the sequence (sequence=True), so each rank already "
                    "holds and sends only 1/t of x; omit scatter_gather"
                )
        marks = [mark for p in stage.parameters() for mark in marks_of(p)]
        for over in (list(mark.comm.ranks) for mark in marks if isinstance(mark, Shard)):
            if over != ranks:
                return f"parameters are sharded over ranks {over}, not {ranks}; pass mesh.tp"
        others = [mark.comm.ranks for mark in marks if not isinstance(mark, Shard)]
        if any(len({*over} & {*ranks}) > 1 for over in others):
            return f"ranks {ranks} share sequences (context_parallel); omit scatter_gather"
    return ""
