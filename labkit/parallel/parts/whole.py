"""A model whose parameters are cut, put together again: for a look, or to compare.

Checkpoints do without: there each rank writes its part (labkit/checkpoints).
"""

from torch import Tensor, nn

from labkit.parallel.parts.conjugate import gathered
from labkit.parallel.parts.shards import Shard, shard_of


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()` as of the plain model: every cut parameter is whole, and the same on
    all ranks, which call it together. One with two names is put together once."""
    whole: dict[int, Tensor] = {}
    found = dict(model.state_dict(keep_vars=True))
    for name, x in found.items():
        if id(x) not in whole:
            shard = shard_of(x)
            whole[id(x)] = x.detach() if shard is None else _joined(x.detach(), shard)
        found[name] = whole[id(x)]
    return found


def _joined(x: Tensor, shard: Shard) -> Tensor:
    """All ranks' parts beside each other, without the padding at the end."""
    return gathered(x, shard.comm, shard.dim).narrow(shard.dim, 0, shard.whole)
