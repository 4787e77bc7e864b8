"""Parameters of which a pipeline has others on other ranks: a mark that names the pipeline.

    rank 0   stage 0: g g g      sum |g|^2 = 3  ╲
    rank 1   stage 1: g g        sum |g|^2 = 6  ╱  all-reduce: 9, the norm of the model is 3

An optimizer knows the parameters of its rank alone; by the mark, a norm over them is one over all
stages. A tied parameter has the same gradient, the sum, on all its owners: the first one's counts.
So it is with a piece of that gradient, as a ZeroOptimizer has.

The mark is weak: without its pipeline, a parameter is one like others. A copy has none.
"""

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from labkit.comm import Comm
from labkit.parallel.common.agreement import WeakMark

_PIPELINE, _ELSEWHERE = "_labkit_pipeline", "_labkit_counts_elsewhere"
Piece = TypeVar("Piece", bound=Tensor)


@runtime_checkable
class InStages(Protocol):
    """What has a model in stages, one or more on each rank of `comm`: a Pipeline."""

    comm: Comm
    module: nn.Module  # what is here, under the names of the whole model
    further_names: dict[str, str]  # of what is tied, in any stages: a further name -> the first

    def owners(self, parameter: Tensor) -> tuple[int, ...]:
        """The ranks of `comm` that have it: several, where it is tied over stages."""
        ...

    def counts_here(self, parameter: Tensor) -> bool:
        """Whether this rank stands for it: no rank before this one has it, too."""
        ...

    def full_state_dict(self) -> dict[str, Tensor]:
        """That of all stages."""
        ...

    def stages_here(self) -> list[tuple[str, nn.Module]]:
        """The stages of this rank, in DDP or ZeRO3 where they are; each with what its names begin
        with in the whole model."""
        ...


def mark_stages(parameters: Iterable[Tensor], pipeline: InStages) -> None:
    """Say that `pipeline` has these."""
    for one in parameters:
        setattr(one, _PIPELINE, WeakMark(pipeline))


def piece_of(parameter: Tensor, x: Piece) -> Piece:
    """`x`, a piece of the gradient of `parameter`, which counts where that does."""
    pipeline = getattr(parameter, _PIPELINE, lambda: None)()
    setattr(x, _ELSEWHERE, pipeline is not None and not pipeline.counts_here(parameter))
    return x


def piece_counts_here(x: Tensor) -> bool:
    """Whether it is not of a parameter that another stage stands for."""
    return not getattr(x, _ELSEWHERE, False)


def tied_with(parameter: Tensor) -> tuple[int, ...]:
    """The ranks of its pipeline that have a copy of it, this one among them; () where it is tied
    to none."""
    pipeline = getattr(parameter, _PIPELINE, lambda: None)()
    owners = () if pipeline is None else pipeline.owners(parameter)
    return owners if len(owners) > 1 else ()


def pipeline_of(trained: Any, parameters: Iterable[Any]) -> InStages | None:
    """The pipeline that `trained` is, or that has `parameters`, over more than one rank."""
    found: Any = trained if isinstance(trained, InStages) else None
    for one in parameters:
        found = found or getattr(one, _PIPELINE, lambda: None)()
    return found if found is not None and found.comm.size > 1 else None
