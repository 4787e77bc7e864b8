"""What a rank holds at full scale, counted without data, beside the ZeRO paper. The GPT has 7.5
billion parameters in two wide layers: what takes time without data is the number of tensors. In 36
layers of width 4096 (arXiv 2104.04473, Table 1) a rank holds as much."""

from typing import Any

import pytest
import torch

from labkit import DDP, GPT, Batch, MasterWeights, ZeRO3, ZeroOptimizer, dry_run, loss, predict
from labkit.trace import CATEGORIES
from small_models import take_steps

SIZES = {"vocab": 10976, "width": 17408, "depth": 2, "heads": 136, "context": 2048}
RANKS, LR = 64, 1e-4
# GB for a model of 7.5B on 64 ranks: ZeRO, arXiv 1910.02054, Table 1 (zero_memory.csv; that these
# are the rows of the file, tests/predict/test_predict.py shows).
HELD_GB = {0: 120, 1: 31.4, 2: 16.6, 3: 1.88}
STATES = ("parameters", "gradients", "optimizer state")


def train(stage: int) -> None:
    if stage == 3:
        with ZeRO3.init():
            model: Any = GPT(**SIZES)
        model = ZeRO3(model, compute_dtype=torch.bfloat16)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR)
    elif stage == 0:
        model = DDP(GPT(**SIZES).to(torch.bfloat16))
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=LR)
    else:
        model = GPT(**SIZES).to(torch.bfloat16)
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=stage, lr=LR)
    x = torch.zeros(1, 64, dtype=torch.long)
    take_steps(optimizer, lambda _: loss(model(x), Batch(x, x, x.numel())))


def test_the_model_has_the_parameters_of_its_name() -> None:
    assert predict.parameters(**SIZES) == pytest.approx(7.5e9, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("stage", HELD_GB)
def test_after_a_step_a_rank_holds_what_the_paper_says(stage: int) -> None:
    memory = dry_run(train, stage, ranks=RANKS).ranks[0].memory
    held = dict(zip(CATEGORIES, memory[-1].held_bytes, strict=True))
    states_bytes = sum(held[name] for name in STATES)
    assert states_bytes / 1e9 == pytest.approx(HELD_GB[stage], rel=0.02), held
    formula = predict.model_state_bytes(predict.parameters(**SIZES), dp=RANKS, stage=stage)
    assert states_bytes == pytest.approx(formula, rel=0.001), held


@pytest.mark.slow
def test_built_and_wrapped_no_rank_holds_the_whole() -> None:
    """Built: a share and one parameter (2.4 GB of 30); wrapped: a unit in compute dtype, too."""

    def build() -> None:
        with ZeRO3.init():
            model = GPT(**SIZES)
        wrapped = ZeRO3(model, compute_dtype=torch.bfloat16)
        torch.optim.SGD(wrapped.parameters(), lr=LR).step()

    share_bytes = 4 * predict.parameters(**SIZES) / RANKS
    parameter_bytes = 4 * SIZES["width"] * 4 * SIZES["width"]
    unit_bytes = 2 * 12.01 * SIZES["width"] ** 2
    one = dry_run(build, ranks=RANKS, step=0).ranks[0]
    (step,) = (span for span in one.spans if span.phase == "optimizer")
    peak_bytes = max(sum(x.held_bytes) for x in one.memory if x.when_s < step.began_s)
    assert parameter_bytes < peak_bytes < share_bytes + parameter_bytes + unit_bytes
