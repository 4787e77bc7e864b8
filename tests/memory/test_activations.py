"""The bill of a layer and the choice of what to recompute, beside what the recorder counts."""

from itertools import product
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from torch import nn

from labkit import GPT, choose_activations, offload_activations, plot, predict, record
from labkit.memory.chooser import Cost, Costs, front, least_recompute, plan_of, smallest_budget
from labkit.memory.edits import CHOICES, Choices
from labkit.memory.measuring import measure
from labkit.memory.saved import SavedTensor, saved_by
from labkit.predict.activations import OTHERS, STATISTICS
from labkit.trace.measures import peak_memory
from recorded_memory import use_core
from small_models import Custom
from tables import raises

SIZES = {"sequence": 64, "rows": 2, "width": 64, "heads": 4}


def gpt(dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)
    return use_core(GPT(32, 64, 3, 4, 64, dropout=0.1).to(dtype))


def check_bill(kept: list[SavedTensor], positions: int = 64, **how: Any) -> None:
    """Term by term, to the byte: the formula leaves out the statistics of the norms alone, of so
    many `positions` of each row."""
    bill = predict.activation_bill(kept, **SIZES, **how)
    lines = [line for line in bill.lines if line.term not in (STATISTICS, OTHERS)]
    assert [x.measured_bytes for x in lines] == [x.formula_bytes for x in lines], bill
    assert bill.formula_bytes == predict.activation_bytes(**SIZES, **how)
    rest = {x.term: x.measured_bytes for x in bill.lines if x not in lines}
    numbers = 0 if how["recompute"] == "full" else 2 * 2 * SIZES["rows"] * positions
    assert rest.get(STATISTICS, 0) in (2 * numbers, 4 * numbers), "2 bytes each, or 4"
    assert rest.get(OTHERS, 0) == 0, bill


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_each_term_is_what_its_module_keeps(recompute: str):
    model = gpt(torch.bfloat16)
    x = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    with Choices(model, recompute):
        check_bill(saved_by(model.blocks[1], x), recompute=recompute)


def test_what_no_term_is_for_is_seen():
    """A mistake: torch's dropout keeps a mask in the type of its input; the core keeps a copy."""
    model = gpt(torch.bfloat16)
    block = model.blocks[0]
    block.attn.core.dropout = nn.Dropout(0.1)
    block.mlp.extra = nn.Sigmoid()
    block.mlp.up.register_forward_hook(lambda module, args, out: block.mlp.extra(out))
    x = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    bill = predict.activation_bill(saved_by(block, x), **SIZES)
    by_term = {line.term: line for line in bill.lines}
    mask = by_term["core: the mask of its dropout"]
    assert mask.measured_bytes == 2 * mask.formula_bytes
    assert by_term["other"].measured_bytes == 8 * 64 * 2 * 64


def test_saving_leaves_out_sparse_tensors_and_is_forgotten_afterwards() -> None:
    block, x = gpt().blocks[0], torch.randn(2, 64, 64, requires_grad=True)
    first = saved_by(block, x)
    assert saved_by(block, x) == first
    assert not any(module._forward_pre_hooks for module in block.modules())
    mixed = Custom(lambda self, x: torch.sparse.mm(self.how * 2, x).exp())
    mixed.register_buffer("how", torch.eye(4).to_sparse())
    (kept,) = saved_by(mixed, torch.randn(4, 3, requires_grad=True))
    assert kept.nbytes == 4 * 3 * 4


def drawn(seed: int, blocks: int) -> Costs:
    """Blocks that differ; what a choice needs is no less than what it keeps."""
    numbers = torch.randint(1, 50, (blocks, 4), generator=torch.Generator().manual_seed(seed))
    made = [
        {
            "none": Cost(kept + less, kept + less + extra),
            "selective": Cost(kept, kept + less + extra, again_flops=work),
            "full": Cost(kept // 3, kept + less + 2 * extra, again_flops=3 * work),
            "offload": Cost(0, less + extra, moved_bytes=kept + less),
        }
        for kept, less, work, extra in numbers.tolist()
    ]
    return Costs(made, 10, 20, 15, leaving_bytes=7, step_flops=1000)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most_moved", [0, 60])
def test_the_choice_is_the_best_of_all(seed: int, most_moved: int):
    costs = drawn(seed, 4)
    every = [plan_of(costs, names) for names in product(CHOICES, repeat=4)]
    every = [plan for plan in every if plan.moved_bytes <= most_moved]
    least = min(plan.peak_bytes for plan in every)
    assert smallest_budget(costs, most_moved) == least
    for budget in (least, least + 17, least + 60, 10**6):
        best = min(plan.again_flops for plan in every if plan.peak_bytes <= budget)
        plan = least_recompute(costs, budget, most_moved)
        assert plan.again_flops == best and plan.peak_bytes <= budget
    ends = {(plan.again_flops, plan.peak_bytes) for plan in every}
    beaten = {x for x, y in product(ends, repeat=2) if y != x and y[0] <= x[0] and y[1] <= x[1]}
    found = front(costs, most_moved)
    assert {(plan.again_flops, plan.peak_bytes) for plan in found} == ends - beaten


def test_what_cannot_be_chosen_or_measured_is_refused() -> None:
    costs = drawn(0, 3)
    least = smallest_budget(costs)
    raises(f"choose at least {least:,} bytes", least_recompute, costs, least - 1)
    raises("2 choices for 3 blocks", plan_of, drawn(0, 3), ["none"] * 2)
    raises("'twice' is not a choice of this block", plan_of, drawn(0, 3), ["none", "none", "twice"])
    model = gpt()
    backwards = list(model.blocks)[::-1]
    with pytest.raises(ValueError, match="was not called exactly once, in order"):
        measure(model, lambda: loss_of(model), blocks=backwards, choices=["none"])
    loss_of(model).backward()
    raises("call zero_grad", measure, model, lambda: loss_of(model))
    model = gpt()
    model.blocks.append(model.blocks[0])
    with pytest.raises(ValueError, match=r"blocks \[0, 3\] are one module, a Block that forward"):
        choose_activations(model, lambda: loss_of(model), 10**9)


TOKENS = torch.randint(32, (2, 64), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logsumexp(-1).mean()


def recorded_peak(model: nn.Module) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with record(detail_step=0) as trace:
        loss_of(model).backward()
        optimizer.step()
    optimizer.zero_grad()
    return sum(peak_memory(trace.ranks[0]).values())


@pytest.mark.slow
def test_the_plan_says_what_the_recorder_counts():
    model = gpt()
    offload = offload_activations(model, smallest_bytes=0)
    before = torch.get_rng_state()
    costs = measure(model, lambda: loss_of(model), offload=offload)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    mixed = ["full", "none", "selective"], ["none", "offload", "full"], ["offload", "full", "none"]
    for names in (*([choice] * 3 for choice in CHOICES), *mixed):
        with Choices(model, names, offload=offload):
            peak, expected = recorded_peak(model), plan_of(costs, names).peak_bytes
        gone = costs.leaving_bytes * 2 if "offload" in names else 0
        assert expected - gone <= peak <= expected, names


@pytest.mark.slow
def test_a_budget_is_met_with_the_least_recomputation():
    model = gpt()
    costs = measure(model, lambda: loss_of(model), choices=["none", "selective", "full"])
    most, least = plan_of(costs, ["none"] * 3).peak_bytes, smallest_budget(costs)
    again = []
    for budget in (most, (most + least) // 2, least):
        chosen = choose_activations(model, lambda: loss_of(model), budget)
        assert recorded_peak(model) <= budget
        again.append(chosen.plan.again)
        chosen.remove()
    assert again[0] == 0 < again[1] < again[2]
    assert recorded_peak(model) == most, "removed, the model is as it was"
    raises("choose at least", choose_activations, model, lambda: loss_of(model), least - 10_000)


def test_frozen_blocks_have_no_backward():
    model = gpt()
    for part in (model.embed, model.blocks[0]):
        part.requires_grad_(False)
    costs = measure(model, lambda: loss_of(model), choices=["none", "full"])
    assert costs.blocks[0]["none"].kept_bytes == 0 == costs.blocks[0]["full"].again_flops
    chosen = choose_activations(model, lambda: loss_of(model), smallest_budget(costs))
    assert recorded_peak(model) <= chosen.plan.peak_bytes


def texts(figure: Any) -> str:
    return " ".join(one.get_text() for one in figure.findobj(Text))


def test_the_bill_is_drawn_to_the_byte():
    block, x = gpt(torch.bfloat16).blocks[0], torch.randn(2, 64, 64, dtype=torch.bfloat16)
    bill = predict.activation_bill(saved_by(block, x.requires_grad_()), **SIZES)
    (axes,) = plot.bill({"none": bill}).axes
    widths = [patch.get_width() for patch in axes.patches]
    assert sum(widths) * 1e3 == pytest.approx(bill.measured_bytes)
    assert "4as/w" in texts(axes.figure) and "GELU" in texts(axes.figure)
    raises("pass at least one bill", plot.bill, {})


def test_the_front_has_every_choice_and_the_pick():
    costs = drawn(1, 3)
    plans = [plan_of(costs, names) for names in product(CHOICES[:3], repeat=3)]
    pick = least_recompute(costs, plans[0].peak_bytes - 5)
    (axes,) = plot.front(plans, pick, plans[0].peak_bytes - 5).axes
    points, _, best, *_, chosen = axes.lines
    assert set(zip(*points.get_data())) == {(100 * p.again, p.peak_bytes) for p in plans}
    assert list(best.get_ydata()) == sorted(best.get_ydata(), reverse=True)
    assert (*chosen.get_xdata(), *chosen.get_ydata()) == (100 * pick.again, pick.peak_bytes)
    assert "full" in texts(axes.figure) and "budget" in texts(axes.figure)
    raises("pass a list of plans", plot.front, [])
