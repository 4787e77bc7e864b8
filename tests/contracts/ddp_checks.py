"""What DDP promises beyond equal weights, on ranks: for test_ddp.py and test_ddp_mutations.py."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labkit import DDP, Comm, listen
from labkit.events import CommEvent
from labkit.parallel.ddp.comm_hooks import Hook
from small_models import Custom, difference
from tables import raises

Strategy = Callable[..., DDP]
SMALL = 0.02  # MiB: one layer of `Layers`


def layers(order: list[int]) -> Any:
    """Four layers of 64 x 64, used in the order `order`, whatever the order of registration."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        for i in order:
            x = torch.tanh(model.layers[i](x))
        return x

    torch.manual_seed(0)
    return Custom(forward, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(4)))


def terms(order: list[int]) -> Any:
    """A sum of terms of different sizes, in the order `order`: it may differ between ranks."""
    torch.manual_seed(0)
    return Custom(
        lambda model, x: sum(model.terms[i](x[:, : i + 2]).tanh() for i in order),
        terms=nn.ModuleList(nn.Linear(width, 3).double() for width in (2, 3, 4, 5, 6)),
    )


def buckets_follow_the_order_of_arrival(strategy: Strategy) -> None:
    """Registered in reverse: from step 2 on, three of four leave before the last gradient."""
    module = layers(order=[3, 2, 1, 0])
    made: list[float] = []
    first_used = module.layers[3].weight
    first_used.register_post_accumulate_grad_hook(lambda _: made.append(time.monotonic()))
    model = strategy(module, bucket_mb=SMALL)
    left, others = [], []
    for _ in range(3):
        module.zero_grad()
        with listen() as events:
            model(torch.ones(1, 64)).sum().backward()
        reduced = [event for event in events if event.op == "all_reduce"]
        assert len(reduced) == 4
        left.append(sum(event.issued_s < made[-1] for event in reduced))
        others.append(len(events) - len(reduced))
        flats = {bucket.flat.untyped_storage().data_ptr() for bucket in model._buckets}
        grads = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
        assert flats == grads, "a gradient is no view of its bucket"
        sizes = (bucket.flat.nbytes for bucket in model._buckets)
        assert sum(sizes) == sum(p.grad.nbytes for p in module.parameters()), "not held once"
    assert left == [0, 3, 3], f"all-reduces before the last gradient: {left}"
    assert others == [2, 0, 0], "the order is agreed upon once: its length, and itself"


def ranks_with_other_orders_agree(strategy: Strategy) -> None:
    """Three steps, with gradients kept and zeroed over the rebuild, against one process."""
    comm = Comm()
    order = [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1]][comm.rank]
    module, reference = terms(order), terms([0, 1, 2, 3, 4])
    model = strategy(module, bucket_mb=200 / 2**20)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 2, 4, 6, dtype=torch.float64, generator=generator)
    for step in range(3):
        for m in (module, reference):
            m.zero_grad(set_to_none=False)
        model(inputs[step, comm.rank]).square().mean().backward()
        reference(inputs[step].flatten(0, 1)).square().mean().backward()
        for name, p in module.named_parameters():
            expected = reference.get_parameter(name)
            assert torch.allclose(p.grad, expected.grad, atol=1e-12), f"{name} in step {step}"
            with torch.no_grad():
                p -= 0.1 * p.grad
                expected -= 0.1 * expected.grad


def branching() -> Any:
    def forward(model: Any, x: torch.Tensor, deep: bool = True) -> Any:
        x = model.always(x)
        return model.sometimes(x) if deep else x

    torch.manual_seed(0)
    return Custom(forward, **{n: nn.Linear(64, 64) for n in ("always", "sometimes", "never")})


def a_static_graph_sends_what_is_used(strategy: Strategy) -> None:
    """Registered last, `never` holds all buckets back in the first step; then it is not sent."""
    module = branching()
    made: list[float] = []
    module.always.weight.register_post_accumulate_grad_hook(lambda _: made.append(time.monotonic()))
    model = strategy(module, bucket_mb=SMALL, static_graph=True)
    seen: list[tuple[int, int]] = []
    for _ in range(3):
        module.zero_grad()
        with listen() as events:
            model(torch.ones(1, 64), deep=True).sum().backward()
        reduced = [event for event in events if event.op == "all_reduce"]
        seen.append((len(reduced), sum(event.issued_s < made[-1] for event in reduced)))
        assert module.never.weight.grad is None
    assert seen == [(3, 0), (2, 1), (2, 1)], seen


def a_static_graph_may_not_change(strategy: Strategy) -> None:
    """Whether it grows, shrinks, or differs between ranks: an error that names the parameter."""

    def step(model: DDP, deep: bool) -> None:
        model(torch.ones(1, 64), deep=deep).sum().backward()

    for first in (True, False):
        model = strategy(branching(), bucket_mb=SMALL, static_graph=True)
        step(model, first)
        raises(("sometimes.", "static_graph=True"), step, model, not first)
        model.zero_grad()
        step(model, first)  # and training may go on
    model = strategy(branching(), static_graph=True)
    words = "sometimes.weight got a gradient on rank 1 and none on rank 0"
    raises((words,), step, model, Comm().rank == 1)


def a_hook_halves_the_bytes(strategy: Strategy, hook: Hook, dtype: torch.dtype) -> None:
    """And gives what an oracle gives that casts likewise, over three steps."""
    comm = Comm()
    module = layers(order=[3, 2, 1, 0])
    alone = copy.deepcopy(module)
    model = strategy(module, bucket_mb=SMALL, hook=hook)
    inputs = torch.randn(3, 2, 5, 64, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        module.zero_grad()
        with listen() as events:
            (1e4 * model(inputs[step, comm.rank]).square().sum()).backward()
        reduced: list[CommEvent] = [event for event in events if event.op == "all_reduce"]
        sent_bytes = sum(event.bus_bytes for event in reduced)
        plain_bytes = sum(p.nbytes for p in module.parameters())  # 2(n-1)/n of them, on 2 ranks
        assert sent_bytes == plain_bytes / 2, f"{sent_bytes} bytes, not half of {plain_bytes}"
        expected = [torch.zeros_like(p).to(dtype) for p in alone.parameters()]
        for x in inputs[step]:
            loss = 1e4 * alone(x).square().sum()
            grads = torch.autograd.grad(loss, list(alone.parameters()))
            expected = [e + (g / comm.size).to(dtype) for e, g in zip(expected, grads)]
        for (name, p), e in zip(module.named_parameters(), expected):
            assert p.grad is not None and p.grad.dtype == torch.float32
            assert torch.equal(p.grad, e.float()), f"{name} in step {step}"


def accumulation_equals_one_batch(strategy: Strategy) -> None:
    """Uneven micro-batches on uneven ranks, with the loss as a sum over a global count."""
    comm = Comm()
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    reference = copy.deepcopy(module)
    model = strategy(module)
    rows = [[4, 4, 1], [4, 3]]  # of the micro-batches of each rank
    count = sum(map(sum, rows))
    inputs = torch.randn(count, 3, dtype=torch.float64)
    mine = inputs.split([sum(of) for of in rows])[comm.rank].split(rows[comm.rank])
    with listen() as events:
        for x in model.accumulate(mine):
            (model(x).square().sum() * comm.size / count).backward()
    (reference(inputs).square().sum() / count).backward()
    for p, expected in zip(module.parameters(), reference.parameters()):
        assert torch.allclose(p.grad, expected.grad, atol=1e-14)
    assert sum(event.bus_bytes for event in events) == 8 * 8, "the gradients, once"
    assert model._synchronize


def ranks_whose_data_ends_join(
    strategy: Strategy, steps: list[int], divide_by_active: bool, **how: Any
) -> None:
    """Rank r has steps[r] batches: with momentum, all end with the weights of one process."""
    comm = Comm()
    module = nn.Sequential(branching().double(), nn.Tanh(), nn.Linear(64, 1).double())
    alone = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(max(steps), comm.size, 3, 64, dtype=torch.float64, generator=generator)
    model = strategy(module, bucket_mb=2 * SMALL, **how)
    with model.join(divide_by_active=divide_by_active):
        velocity = [torch.zeros_like(p) for p in module.parameters()]
        for step in range(steps[comm.rank]):
            model.zero_grad()
            model(inputs[step, comm.rank]).square().mean().backward()
            _step(module, velocity)
    velocity = [torch.zeros_like(p) for p in alone.parameters()]
    for step in range(max(steps)):
        active = [rank for rank in range(comm.size) if step < steps[rank]]
        losses = [alone(inputs[step, rank]).square().mean() for rank in active]
        alone.zero_grad()
        (sum(losses) / (len(active) if divide_by_active else comm.size)).backward()
        _step(alone, velocity)
    assert difference(module.state_dict(), alone.state_dict()) < 1e-12


def _step(module: nn.Module, velocity: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for p, v in zip(module.parameters(), velocity):
            if p.grad is not None:
                p -= v.mul_(0.9).add_(p.grad).mul(0.1)
