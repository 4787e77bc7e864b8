"""Gradients of micro-batches summed in fp32 keep what bf16 loses."""

import copy

import pytest
import torch
from torch import nn

from labkit import DDP, MLP, Fp32Gradients, MasterWeights, ZeroOptimizer, attach, listen
from tables import raises
from worlds import on_each_rank

K = 1024


def summed(k: int, keep: bool) -> torch.Tensor:
    p = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    gradients = Fp32Gradients([p]) if keep else None
    for _ in range(k):
        (p.sum() * 2.0**-8).backward()
    if gradients:
        gradients.hand_over()
    return p.grad


def test_a_sum_in_bf16_stands_still_and_in_fp32_is_exact() -> None:
    assert summed(K, keep=False).tolist() == [1.0] * 3  # 256 of them; 1 + 2⁻⁸ is rounded to 1
    kept = summed(K, keep=True)
    assert kept.dtype == torch.float32 and kept.tolist() == [K * 2.0**-8] * 3


def test_steps_with_master_weights_are_those_on_the_exact_sum() -> None:
    torch.manual_seed(0)
    low = MLP([4, 5, 2]).bfloat16()
    other = copy.deepcopy(low)
    parts = [torch.randn(3, 4).bfloat16() for _ in range(6)]
    ours = MasterWeights(low.parameters(), torch.optim.AdamW, lr=0.01)
    gradients = Fp32Gradients(low.parameters())
    theirs = MasterWeights(other.parameters(), torch.optim.AdamW, lr=0.01)
    for _ in range(3):  # the second step must begin from zero
        total = [torch.zeros(p.shape) for p in other.parameters()]
        for part in parts:
            (low(part).square().sum() / len(parts)).backward()
            loss = other(part).square().sum() / len(parts)
            for x, g in zip(total, torch.autograd.grad(loss, other.parameters()), strict=True):
                x += g
        gradients.hand_over()
        for p, x in zip(other.parameters(), total, strict=True):
            p.grad_dtype = None
            p.grad = x
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for one, right in zip(ours.state, theirs.state, strict=True):
        assert torch.equal(one, right)


def test_it_holds_4_bytes_a_parameter_and_no_gradient_beside_them() -> None:
    model = MLP([4, 5, 2]).bfloat16()
    gradients = Fp32Gradients(model.parameters())
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert gradients.flat.nbytes == 4 * sum(p.numel() for p in model.parameters())
    gradients.hand_over()
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert storages == {gradients.flat.untyped_storage().data_ptr()}, "handed over, not copied"


def test_an_unused_parameter_has_no_gradient_and_one_given_twice_counts_once() -> None:
    used, not_used = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    gradients = Fp32Gradients([used, not_used])
    used.sum().backward()
    gradients.hand_over()
    assert used.grad is not None and not_used.grad is None
    p = nn.Parameter(torch.ones(2))
    gradients = Fp32Gradients([p, p])
    (3 * p).sum().backward()
    gradients.hand_over()
    assert p.grad.tolist() == [3.0, 3.0]


def test_gradients_of_the_last_step_that_are_still_there_are_an_error() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    gradients = Fp32Gradients([p])
    p.sum().backward()
    gradients.hand_over()
    words = r"call optimizer.zero_grad\(\) after each step, without set_to_none=False"
    raises(words, p.sum().backward, error=RuntimeError)
    torch.optim.SGD([p]).zero_grad(set_to_none=False)
    raises(words, p.sum().backward, error=RuntimeError)


def test_what_cannot_be_added_up_is_refused_and_removed_it_lets_gradients_be() -> None:
    with pytest.raises(ValueError, match="would round gradients of torch.float64"):
        Fp32Gradients([nn.Parameter(torch.ones(2, dtype=torch.float64))])
    raises(
        "at least one parameter", Fp32Gradients, [nn.Parameter(torch.ones(2), requires_grad=False)]
    )
    p = nn.Parameter(torch.ones(2))
    Fp32Gradients([p]).remove()
    p.sum().backward()
    assert p.grad is not None


@on_each_rank("world2")
def test_a_strategy_that_sends_gradients_in_order_of_arrival_is_an_error() -> None:
    comm = attach().comm
    ddp = DDP(nn.Linear(2, 1).bfloat16(), comm)
    gradients = Fp32Gradients(ddp.parameters(), comm)
    row = torch.ones(1, 2).bfloat16()
    raises("DDP sends these gradients as soon as they are ready; with DDP", ddp(row).sum().backward)
    ddp = DDP(nn.Linear(2, 1).bfloat16(), comm)
    gradients = Fp32Gradients(ddp.parameters())
    with ddp.no_sync():
        words = "gradients are not averaged over the 2 ranks of DDP.*pass its comm"
        raises(words, ddp(row).sum().backward)
    layer = nn.Linear(2, 1).bfloat16()
    zero = ZeroOptimizer(layer.parameters(), torch.optim.SGD, stage=1, lr=0.1)
    gradients = Fp32Gradients(layer.parameters())
    raises("a ZeroOptimizer sends .* ZeRO accumulates its own shards", layer(row).sum().backward)
    del zero, gradients


@on_each_rank("world2")
def test_a_rank_without_micro_batches_adds_nothing() -> None:
    """Nor what it handed over the step before."""
    me = attach()
    p = nn.Parameter(torch.ones(2, device=me.device))
    gradients = Fp32Gradients([p], me.comm)
    for mean, ranks in ((2.0, (0, 1)), (1.0, (0,))):
        if me.rank in ranks:
            (2 * p).sum().backward()
        gradients.hand_over()
        assert p.grad.tolist() == [mean] * 2
        p.grad = None


@pytest.mark.slow
@on_each_rank("world2")
def test_with_ddp_the_exact_sums_are_averaged_in_one_message() -> None:
    """Each rank's micro-batches give gradients of (rank + 1) · 2⁻⁸, K of them."""
    me = attach()
    model = nn.Linear(2, 1, bias=False).to(me.device, torch.bfloat16)
    ddp = DDP(model, me.comm)
    gradients = Fp32Gradients(model.parameters(), me.comm)
    row = torch.full((1, 2), (me.rank + 1) * 2.0**-8, device=me.device).bfloat16()
    with listen() as events:
        for _ in range(K):
            with ddp.no_sync():
                ddp(row).sum().backward()
        gradients.hand_over()
    assert model.weight.grad.flatten().tolist() == [1.5 * K * 2.0**-8] * 2
    sent_bytes = sum(event.bus_bytes for event in events)
    assert sent_bytes == 2 * 4, "2(n-1)/n · 4 bytes a parameter, of 2 parameters"
