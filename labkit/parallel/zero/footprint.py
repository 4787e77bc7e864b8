"""What ZeRO-1 and 2 cost a rank, to the byte: the formulas at the top of zero.py, with the padding
of buckets, the step counts of Adam, and parameters that a cut leaves with no element on a rank.
"""

from torch import nn

from labkit.parallel.common.flat import FlatPartition
from labkit.parallel.common.footprint import Footprint, parameter_bytes
from labkit.parallel.common.grad_reducer import MB, cut
from labkit.precision.shadow_optimizer import LOW

STEP_COUNT_BYTES = 4  # Adam has one for each tensor that it steps on


def predict_zero(
    module: nn.Module, size: int, stage: int, bucket_mb: float = 25, rank: int | None = None
) -> Footprint:
    """With Adam, on `rank`; None: the mean of all ranks. Padding is sent, (n-1)/n of each bucket
    and its padding twice, but not counted as held: it belongs to no parameter."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    ranks = range(size) if rank is None else [rank]
    n = len(ranks)
    gradients = optimizer = sent = 0  # bytes; the first two of all these ranks
    for some in cut(trainable, bucket_mb * MB):
        layout = FlatPartition([p.shape for p in some], size)
        element, low = some[0].element_size(), some[0].dtype in LOW
        state = 4 + 2 * 4 if low else 2 * element  # the master copy and two moments
        pieces = [piece for one in ranks for piece in layout.pieces(one)]
        own = sum(piece.numel for piece in pieces)
        gradients += (own if stage == 2 else layout.numel * len(ranks)) * element
        optimizer += own * state + STEP_COUNT_BYTES * len(pieces)
        sent += 2 * (size - 1) * layout.share * element
    return Footprint(parameter_bytes(module), gradients / n, optimizer / n, sent)
