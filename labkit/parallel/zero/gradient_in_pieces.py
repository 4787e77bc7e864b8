"""What stands in `.grad` under ZeRO, whose ranks have a share each of an averaged gradient: torch's
`clip_grad_norm_` would clip each share by its own norm, and skip a `.grad` that is None."""

from typing import Any

import torch


class GradientInPieces(torch.Tensor):
    """Has the gradient's shape and dtype; computing with it raises ValueError."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise ValueError(
            f"{func.overloadpacket.__name__} on the `.grad` of a ZeroOptimizer's parameter: each "
            "rank has a share of the averaged gradient; clip with labkit.clip_grad_norm, scale by "
            "labkit.GradScaler (torch.amp.GradScaler is not supported), change the tensors of "
            "optimizer.gradient_pieces()[0], or set `.grad` to a new one, which step averages"
        )

    __repr__ = object.__repr__  # type: ignore[assignment]


def gradient_in_pieces(p: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """For `p.grad`; it holds the memory of `gradient`, or none."""
    like = p.detach().new_empty(()).expand(p.shape) if gradient is None else gradient
    if type(like) is not torch.Tensor:  # a fake one, in a dry run
        return like
    if gradient is None:
        like.untyped_storage().resize_(0)
    return torch.Tensor._make_subclass(GradientInPieces, like)
