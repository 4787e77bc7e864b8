"""What many tests of strategies need: modules and steps in one line, how far weights are apart."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


class Custom(nn.Module):
    """`forward(self, ...)` over the given submodules, parameters and other attributes."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def take_steps(optimizer: Any, loss: Callable[[int], Tensor], count: int = 2) -> None:
    """Train: `loss(step)` is the loss of each of `count` steps."""
    for step in range(count):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()


class Difference(float):
    """The largest distance of two elements, and the name of the tensor that has it."""

    name = ""

    def __format__(self, spec: str) -> str:
        return f"{float(self):{spec or '.1e'}} in {self.name or 'none'}"

    def __repr__(self) -> str:
        return format(self)


def difference(found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> Difference:
    """Of tensors with the same names, shapes and dtypes, without a NaN, and without an inf on
    both sides: AssertionError otherwise, which names the tensor."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    worst = Difference()
    for name, x in expected.items():
        y = found[name]
        assert y.shape == x.shape and y.dtype == x.dtype, f"{name}: {y.shape} {y.dtype}"
        apart = (y.detach() - x.detach()).abs().double()
        assert not apart.isnan().any(), f"{name} has a NaN, or an inf on both sides"
        if apart.numel() and (far := apart.max().item()) > worst:
            worst = Difference(far)
            worst.name = name
    return worst
