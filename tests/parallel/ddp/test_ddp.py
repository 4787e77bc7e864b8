"""DDP to production strength: order of buckets, static graph, hooks, accumulation, bad input."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import ddp_checks
from labkit import DDP, Comm, Link, World
from labkit.parallel.ddp import comm_hooks
from labkit.parallel.ddp.comm_hooks import bf16_compress_hook, fp16_compress_hook
from small_models import difference
from tables import cases, raises
from worlds import on_each_rank, on_ranks_of_its_own

CHECKS = [
    ddp_checks.buckets_follow_the_order_of_arrival,
    ddp_checks.ranks_with_other_orders_agree,
    ddp_checks.a_static_graph_sends_what_is_used,
    ddp_checks.a_static_graph_may_not_change,
    ddp_checks.accumulation_equals_one_batch,
]


@pytest.mark.parametrize("check", CHECKS)
def test_ddp(world2: World, check: Any) -> None:
    world2.run(check, DDP)


@cases((fp16_compress_hook, torch.float16), (bf16_compress_hook, torch.bfloat16))
@on_each_rank("world2")
def test_a_compressing_hook_halves_the_bytes(hook: Any, dtype: torch.dtype) -> None:
    ddp_checks.a_hook_halves_the_bytes(DDP, hook, dtype)


@on_each_rank("world2")
def test_division_before_the_cast_keeps_fp16_from_overflow() -> None:
    module = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[60_000.0, 1e-9]])  # twice the one is too large, the other too small
    model = DDP(module, hook=fp16_compress_hook)
    model(x).sum().backward()
    assert module.weight.grad[0].tolist() == [60_000.0, 0.0]


@on_each_rank("world2")
def test_what_a_hook_makes_zero_is_not_taken_for_unused() -> None:
    """-1e-9 is -0.0 in fp16, which would say that nobody used it; only rank 0 does."""
    module = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
    model = DDP(module, hook=fp16_compress_hook)
    value = module[0](torch.ones(1, 1)).sum()
    if Comm().rank == 0:
        value = value + module[1](torch.full((1, 1), -1e-9)).sum()
    value.backward()
    del model
    grads = [None if p.grad is None else p.grad.item() for p in module.parameters()]
    assert grads == [1.0, 0.0, None]


@on_each_rank("world2")
def test_a_hook_is_a_plain_function() -> None:
    """It need not be quick, nor say when it is done; complex numbers and small ones go, too."""

    def twice(flat: torch.Tensor, comm: Comm, async_op: bool) -> None:
        comm.all_reduce(flat)
        flat.mul_(2)

    for dtype, hook, expected in (
        (torch.float32, twice, 2),
        (torch.complex64, bf16_compress_hook, 1 + 0j),
        (torch.bfloat16, bf16_compress_hook, 1),
    ):
        module = nn.Linear(1, 1, bias=False, dtype=dtype)
        model = DDP(module, hook=hook)
        model(torch.ones(1, 1, dtype=dtype)).real.sum().backward()
        assert module.weight.grad is not None and module.weight.grad.item() == expected
    words = "compressed(torch.int8): choose torch.bfloat16 or torch.float16"
    raises((words,), comm_hooks.compressed, torch.int8)


@on_each_rank("world2")
def test_accumulation_that_is_left_early_sends_again() -> None:
    model = DDP(nn.Linear(1, 1))
    for _ in model.accumulate([1, 2, 3]):
        break
    assert model._synchronize
    with model.no_sync():
        with model.no_sync():
            pass
        assert not model._synchronize, "the inner block does not end the outer one"
    assert list(model.accumulate([])) == []


@on_each_rank("world2")
def test_an_error_in_the_first_backward_leaves_the_order_to_the_next() -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model = DDP(module, static_graph=True)
    hook = module[0].weight.register_hook(fail)
    raises("on purpose", model(torch.ones(1, 3)).sum().backward, error=RuntimeError)
    hook.remove()
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
    assert model._arrived is None


@on_ranks_of_its_own(2, link=Link(gbps=0.05))
def test_a_backward_cut_short_does_not_reach_into_the_next_one() -> None:
    """Its gradients are still on the wire when the next one fills the buckets."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).double()
    model = DDP(module, bucket_mb=0.03)
    x = torch.randn(4, 64, dtype=torch.float64) * (1 + Comm().rank)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("on purpose")

    def gradients(fails: bool = False) -> dict[str, torch.Tensor]:
        hook = module[0].weight.register_hook(fail) if fails else None
        model.zero_grad()
        with suppress(KeyError):
            (model(x).square().sum() * (100 if fails else 1)).backward()
        if hook:
            hook.remove()
        return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}

    expected = gradients()
    gradients(fails=True)
    assert difference(gradients(), expected) < 1e-12
