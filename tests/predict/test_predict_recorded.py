"""The closed formulas beside the operations that a recording of GPT counts."""

from collections.abc import Callable
from functools import partial

import pytest
from torch.optim import SGD

from labkit import predict
from labkit.models import GPT
from recorded_memory import recorded_step, use_core
from test_recompute import torchs_kernel

SIZES = {"sequence": 128, "rows": 1, "width": 256, "heads": 8, "depth": 3, "vocab": 64}


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize(("edit", "flash"), [(use_core, False), (torchs_kernel, True)])
def test_operations_of_a_step_are_what_is_recorded(
    edit: Callable[[GPT], object], flash: bool, kv_heads: int | None
) -> None:
    step = recorded_step(**SIZES, kv_heads=kv_heads, edit=edit, optimizer=partial(SGD, lr=0.1))
    forward, backward = (
        sum(span.flops or 0 for span in step.spans if span.phase == phase)
        for phase in ("forward", "backward")
    )
    assert forward == predict.forward_flops(**SIZES, kv_heads=kv_heads)
    assert forward + backward == predict.step_flops(**SIZES, kv_heads=kv_heads, flash=flash)
