"""Flat buffers of concatenated tensors, for parameters and gradients.

    tensors   | a a a a a a a a | b b | c c c c c c c c c c c | pad |     FlatPartition
    shares    |     rank 0      |     rank 1      |     rank 2      |

Equal shares may split a tensor within a row, so optimizers must update elements independently. A
rank that did not use a parameter contributes -0.0. A sum is -0.0 only if every term is -0.0;
the gradient then stays None. Gradients are divided before summation, so that fp16 sums do not
overflow; adding 0.0 turns a -0.0 from underflow into 0.0.
Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.1; DeepSpeed's flat fp16 groups.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from labkit.parallel.common.ownership import WeakMark

MB = 2**20
P = TypeVar("P", bound=Tensor)


@dataclass(frozen=True)
class Piece:
    """`numel` elements at offset `start` of tensor `index` and at offset `at` of a rank's share."""

    index: int
    start: int
    at: int
    numel: int


class FlatPartition:
    """Splits tensors of `numel` elements in total into `ranks` equal shares of `share` elements; a
    buffer has `padded` = share * ranks elements, with padding at the end."""

    def __init__(self, shapes: Sequence[torch.Size], ranks: int):
        self.shapes, self.ranks = list(shapes), ranks
        self.numels = [shape.numel() for shape in self.shapes]
        self.numel = sum(self.numels)
        self.starts = [0, *accumulate(self.numels)][:-1]
        self.share = -(-self.numel // ranks)
        self.padded = self.share * ranks

    def pieces(self, rank: int) -> Iterator[Piece]:
        begin, end = rank * self.share, (rank + 1) * self.share
        for index, (start, numel) in enumerate(zip(self.starts, self.numels)):
            first, last = max(start, begin), min(start + numel, end)
            if first < last:
                yield Piece(index, first - start, first - begin, last - first)

    def share_of(self, buffer: Tensor, rank: int) -> Tensor:
        """buffer [padded] -> a view [share]."""
        return buffer[rank * self.share : (rank + 1) * self.share]

    def views(self, buffer: Tensor) -> list[Tensor]:
        parts = buffer[: self.numel].split(self.numels)
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]


def cut(parameters: Sequence[P], bucket_bytes: float) -> list[list[P]]:
    """Groups parameters, in reverse order, into buckets of one dtype and device. A bucket has at
    most `bucket_bytes`, or one larger parameter. Raises ValueError unless `bucket_bytes` > 0."""
    if not bucket_bytes > 0:
        raise ValueError(f"bucket_mb={bucket_bytes / MB:g}: choose more than 0 MiB; 25 is usual")
    full: list[list[P]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[P]] = {}
    for parameter in reversed(parameters):
        bucket = filling.setdefault((parameter.dtype, parameter.device), [])
        if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > bucket_bytes:
            full.append(bucket.copy())
            bucket.clear()
        bucket.append(parameter)
    return full + [rest for rest in filling.values() if rest]


class GradBuffer:
    """The gradients of `parameters` in one flat tensor; `names` are for error messages."""

    def __init__(
        self, parameters: Sequence[Tensor], partition: FlatPartition, names: Mapping[Any, str]
    ):
        self.parameters, self.partition, self._names = list(parameters), partition, names
        self.flat: Tensor | None = None
        self.view: dict[Tensor, Tensor] = {}
        ranks, share = range(partition.ranks), partition.share
        begins = [rank * share + piece.at for rank in ranks for piece in partition.pieces(rank)]
        first = self.parameters[0]
        self._begins = torch.tensor(begins, dtype=torch.long, device=first.device)
        self._zeros = torch.zeros(len(begins), dtype=first.dtype, device=first.device)
        self.missing = set(self.parameters)  # no gradient yet in this backward
        self.unused: set[Tensor] = set()  # parameters unused by this rank in the last backward

    def use(self, flat: Tensor) -> None:
        views = self.partition.views(flat)
        self.flat, self.view = flat, dict(zip(self.parameters, views, strict=True))

    def free(self) -> None:
        self.flat, self.view = None, {}

    def reset(self) -> None:
        self.missing = set(self.parameters)  # ready for the next backward

    def take(self, p: Tensor) -> None:
        """Marks the gradient of `p` as ready; raises RuntimeError if `p` is already marked."""
        if p not in self.missing:
            raise RuntimeError(
                f"the gradient of {self._names[p]} was computed twice in one backward, as "
                "with reentrant checkpointing; use torch.utils.checkpoint(..., "
                "use_reentrant=False). If an error interrupted the last backward, call zero_grad()"
            )
        self.missing.remove(p)

    def put(self, p: Tensor, divisor: float) -> None:
        """Writes the divided `p.grad` to the buffer and makes `p.grad` a view of the buffer."""
        assert p.grad is not None
        check_dense(p.grad)
        torch.div(p.grad.detach(), divisor, out=self.view[p])
        p.grad = self.view[p]

    def flag_unused(self) -> Tensor:
        """Returns the flat gradients, with -0.0 for parameters that this rank did not use."""
        assert self.flat is not None
        self.flat.index_add_(0, self._begins, self._zeros)  # so no used gradient begins with -0.0
        self.unused = {p for p in self.parameters if p.grad is None}
        for p in self.unused:
            self.view[p].fill_(-0.0)
        return self.flat


def flagged_unused(flat: Tensor) -> bool:
    """Whether the reduced gradient shows that no rank used the parameter."""
    first = flat[:1].real if flat.is_complex() else flat[:1]
    return bool(((first == 0) & torch.signbit(first)).all())


def check_dense(gradient: Tensor) -> None:
    """Raises TypeError for a sparse gradient."""
    if gradient.layout != torch.strided:
        raise TypeError(
            f"a gradient is {gradient.layout}, but gradients must be dense; pass sparse=False"
        )


def while_alive(method: Any) -> Callable[..., Any]:
    """Wraps `method` as a hook with a weak reference to its object; a copied hook does nothing."""
    return partial(_call, WeakMark(method.__self__), method.__func__)


def _call(owner: Callable[[], Any], function: Callable[..., Any], *args: Any) -> Any:
    return None if (alive := owner()) is None else function(alive, *args)


def register_grad_ready_hook(parameter: Tensor, method: Callable[[Any], None]) -> None:
    """Calls `method(parameter)` each time autograd has accumulated the gradient of `parameter`."""
    parameter.register_post_accumulate_grad_hook(while_alive(method))
