"""What many tests of strategies need: modules in one line, how far weights are apart, refusals."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
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


def difference(found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> float:
    """The largest, over tensors of the same names, shapes and dtypes; NaN where one has a NaN."""
    assert found.keys() == expected.keys()
    apart = [torch.zeros((), dtype=torch.float64)]
    for name, x in expected.items():
        assert found[name].shape == x.shape and found[name].dtype == x.dtype, name
        apart.append((found[name].detach() - x.detach()).abs().double().flatten())
    return torch.hstack(apart).max().item()  # of tensors: Python's max passes over a NaN


def saved(x: Any) -> Any:
    """Through `torch.save` and `torch.load`."""
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def refused(call: Callable[[], Any], *words: str, error: Any = ValueError) -> str:
    """The message of the error that `call` raises, in which all `words` are."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    del caught  # its traceback would keep what failed alive
    for some in words:
        assert some in message, message
    return message
