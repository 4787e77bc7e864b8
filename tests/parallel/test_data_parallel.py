"""Single, naive and bucketed DDP: equal weights, the bytes that the formula says, and overlap.

The contract is tested through `contract`, which test_data_parallel_mutations.py turns on faulty
strategies: it must turn red there.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from data_parallel_contract import (
    CASES,
    CONTRACT_SIZES,
    Branching,
    check_equal_to_single,
    weights_after,
)
from labkit import DDP, Comm, Link, NaiveDDP, Single, World, attach, listen
from labkit.events import CommEvent
from labkit.parallel.common.flat import cut
from labkit.parallel.common.held import held
from worlds import on_each_rank, world_fixture


def small_buckets(module: nn.Module) -> DDP:
    return DDP(module, bucket_mb=0.001)


def no_overlap(module: nn.Module) -> DDP:
    return DDP(module, overlap=False)


STRATEGIES = [NaiveDDP, DDP, small_buckets, no_overlap]
names = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.__name__)


SIZES = [pytest.param(n, marks=pytest.mark.slow) if n == 4 else n for n in CONTRACT_SIZES]


world = world_fixture(sizes=SIZES, timeout_s=20)


@names
@pytest.mark.parametrize("case", CASES)
def test_weights_equal_single_process_training(
    world: World, strategy: Callable[[nn.Module], nn.Module], case: str
) -> None:
    check_equal_to_single(world, strategy, case)


@pytest.mark.slow
def test_losses_agree_in_float32(world2: World) -> None:
    ours = world2.run(weights_after, DDP, "gpt", dtype=torch.float32)
    with World(1) as one:
        oracle = one.run(weights_after, Single, "gpt", dtype=torch.float32)[0]
    mean = [sum(losses) / 2 for losses in zip(*(run.losses for run in ours))]
    assert mean == pytest.approx(oracle.losses, rel=1e-4)


def test_batch_norm_buffers_follow_rank_0(world2: World) -> None:
    def statistics(strategy: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(Comm().rank)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        model = strategy(module)
        for _ in range(3):
            model(torch.randn(5, 3)).sum().backward()
        model(torch.zeros(5, 3))  # the same on all ranks, after rank 0's statistics came
        return [buffer.clone() for buffer in module.buffers()]

    for strategy in (NaiveDDP, DDP):
        mine, other = world2.run(statistics, strategy)
        assert int(mine[2]) == 4
        assert all(torch.equal(a, b) for a, b in zip(mine, other))


@on_each_rank("world2")
def test_eval_and_no_grad_forwards_send_nothing() -> None:
    model = DDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with listen() as events:
        with torch.no_grad():
            model(torch.zeros(5, 3))
        model.eval()
        model(torch.zeros(5, 3))
    assert len(events) == 0


@names
@on_each_rank("world2")
def test_only_the_last_of_accumulated_backwards_sends(
    strategy: Callable[[nn.Module], nn.Module],
) -> None:
    comm = Comm()
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    reference = copy.deepcopy(module)
    model = strategy(module)
    inputs = torch.randn(4, 2, 5, 3, dtype=torch.float64)  # [micro-batch, rank, row, feature]
    with listen() as quiet, model.no_sync():  # type: ignore[operator]
        for step in range(3):
            model(inputs[step, comm.rank]).square().mean().backward()
    with listen() as loud:
        model(inputs[3, comm.rank]).square().mean().backward()
    for step in range(4):
        (reference(inputs[step].flatten(0, 1)).square().mean()).backward()
    assert module.weight.grad is not None and reference.weight.grad is not None
    quiet = len(quiet)
    loud = len(loud)
    gradient = module.weight.grad
    expected = reference.weight.grad
    assert quiet == 0
    assert loud > 0
    torch.testing.assert_close(gradient, expected)


@names
@on_each_rank("world2")
def test_a_second_backward_adds_as_in_one_process(
    strategy: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    reference = copy.deepcopy(module)
    model = strategy(module)
    inputs = torch.randn(2, 2, 5, 3, dtype=torch.float64)
    for step in range(2):
        model(inputs[step, Comm().rank]).square().mean().backward()
        reference(inputs[step].flatten(0, 1)).square().mean().backward()
    assert module.weight.grad is not None and reference.weight.grad is not None
    gradient = module.weight.grad
    expected = reference.weight.grad
    torch.testing.assert_close(gradient, expected)


@names
def test_unused_parameters_are_averaged_where_used_and_left_alone_where_not(
    world2: World, strategy: Callable[[nn.Module], nn.Module]
) -> None:
    def gradients() -> dict[str, torch.Tensor | None]:
        torch.manual_seed(0)
        module = Branching()
        model = strategy(module)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 3, dtype=torch.float64), deep=Comm().rank == 0).sum().backward()
        return {name: p.grad for name, p in module.named_parameters()}

    mine, other = world2.run(gradients)
    for name, gradient in mine.items():
        if name.startswith("nobody"):
            assert gradient is None and other[name] is None
        else:
            assert gradient is not None
            torch.testing.assert_close(gradient, other[name])
    assert mine["both.bias"] is not None
    torch.testing.assert_close(mine["both.bias"], torch.ones(3, dtype=torch.float64))  # 2 / 2 ranks


@names
@on_each_rank("world2")
def test_a_true_zero_gradient_is_not_taken_for_unused(
    strategy: Callable[[nn.Module], nn.Module],
) -> None:
    module = nn.Linear(2, 2, bias=False)
    other = nn.Linear(2, 2, bias=False)
    model = strategy(nn.ModuleList([module, other]))
    x = torch.ones(1, 2)
    value = other(x).sum()
    if Comm().rank == 0:  # -0.0 in every place, from rank 0 alone
        value = value + (module(x) * -0.0).sum()
    value.backward()
    del model
    found = module.weight.grad
    assert found is not None
    assert not found.any()


@names
def test_a_gradient_that_underflows_in_the_mean_is_not_taken_for_unused(
    strategy: Callable[[nn.Module], nn.Module],
) -> None:
    """fp16: the smallest number below zero, divided by 4 ranks, is -0.0; one rank alone has it."""

    def gradient() -> torch.Tensor | None:
        module = nn.Linear(2, 1, bias=False).half()
        other = nn.Linear(2, 1, bias=False).half()
        model = strategy(nn.ModuleList([module, other]))
        x = torch.ones(1, 2).half()
        value = other(x).sum()
        if Comm().rank == 0:
            value = value + (module(x) * 0).sum() - module.weight[0, 0] * 6e-8 + module.weight[0, 1]
        value.backward()
        del model
        return module.weight.grad

    with World(4, timeout_s=20) as world:
        for found in world.run(gradient):
            assert found is not None
            assert found.tolist() == [[0.0, 0.25]]


@on_each_rank("world2")
def test_frozen_parameters_are_neither_sent_nor_touched() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    module[0].requires_grad_(False)
    with_gradients = DDP(module)
    with listen() as events:
        with_gradients(torch.ones(1, 3)).sum().backward()
    assert (
        sum(event.payload_bytes for event in events) == (5 * 2 + 2) * 4
        and module[0].weight.grad is None
    )


@on_each_rank("world2")
def test_gradients_are_views_of_their_bucket_and_held_once() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model = DDP(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    storages = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}  # type: ignore[union-attr]
    sizes = [bucket.flat.nbytes for bucket in model._buckets]
    gradient_bytes = int(held(module, optimizer).gradient_bytes)
    assert len(storages) == 1
    assert sizes == [gradient_bytes] == [(15 + 5 + 10 + 2) * 4]


def test_buckets_are_filled_last_parameter_first_and_by_dtype() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (4, 1, 2, 9)]
    parameters.insert(1, nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    buckets = cut(parameters, bucket_bytes=12)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[9], [2, 1], [4], [3]]
    assert [{p.dtype for p in bucket} for bucket in buckets].count({torch.float64}) == 1


def test_buckets_leave_while_backward_still_runs() -> None:
    """On a slow wire: the first bucket is on its way before the first layer's gradient is made."""

    def run(overlap: bool) -> tuple[list[CommEvent], float]:
        import time

        layers = [nn.Linear(64, 64) for _ in range(4)]
        made: list[float] = []
        layers[0].weight.register_post_accumulate_grad_hook(lambda _: made.append(time.monotonic()))
        model = DDP(nn.Sequential(*layers), bucket_mb=0.02, overlap=overlap)
        with listen() as events:
            model(torch.ones(1, 64)).sum().backward()
        return [event for event in events if event.op == "all_reduce"], made[0]

    with World(2, link=Link(gbps=0.1)) as world:
        for events, made_s in world.run(run, True):
            assert len(events) == 4
            assert sum(event.issued_s < made_s for event in events) == 3
            assert [event.blocking for event in events] == [False, False, False, True]
        for events, made_s in world.run(run, False):
            assert all(event.issued_s > made_s for event in events)


@names
@on_each_rank("world2")
def test_replicas_start_as_rank_0s(strategy: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(Comm().rank)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    strategy(module)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    differences = [
        a - b for a, b in zip(module.state_dict().values(), expected.state_dict().values())
    ]
    assert not any(difference.any() for difference in differences)


def test_an_error_in_backward_does_not_spoil_the_next_step(world2: World) -> None:
    def run() -> torch.Tensor:
        def fail(_: torch.Tensor) -> None:
            raise RuntimeError("on purpose")

        module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        model = DDP(module, bucket_mb=100)
        hook = module[0].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.ones(1, 3)).sum().backward()
        hook.remove()
        model.zero_grad()
        model(torch.full((1, 3), Comm().rank + 1.0)).sum().backward()
        assert module[0].weight.grad is not None
        return module[0].weight.grad

    mine, other = world2.run(run)
    assert torch.equal(mine, other)
    assert mine.any()


@on_each_rank("world2")
def test_plain_torch_loop_works_unchanged_and_without_warnings() -> None:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DDP(nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            for set_to_none in (True, False):
                optimizer.zero_grad(set_to_none=set_to_none)
                model(torch.ones(2, 3)).sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    assert [str(one.message) for one in caught] == []


@pytest.mark.parametrize("strategy", [NaiveDDP, DDP])
def test_a_module_without_trainable_parameters_is_refused(
    world2: World, strategy: type[nn.Module]
) -> None:
    def run() -> str:
        with pytest.raises(ValueError) as caught:
            strategy(nn.ReLU())
        return str(caught.value)

    assert "no trainable parameter" in world2.run(run)[0]


def test_sparse_gradients_are_refused_with_the_remedy(world2: World) -> None:
    def run() -> str:
        model = DDP(nn.Embedding(5, 2, sparse=True))
        with pytest.raises(TypeError) as caught:
            model(torch.tensor([1])).sum().backward()
        return str(caught.value)

    assert "sparse=False" in world2.run(run)[0]


def test_single_refuses_a_larger_world(world2: World) -> None:
    def run() -> str:
        with pytest.raises(ValueError) as caught:
            Single(nn.Linear(1, 1), attach().comm)
        return str(caught.value)

    assert "2 ranks" in world2.run(run)[0]


@names
@on_each_rank("world2")
def test_a_dropped_module_is_freed(
    strategy: Callable[[nn.Module], nn.Module],
) -> None:
    module = nn.Linear(3, 2)
    wrapped, alive = strategy(module), weakref.ref(module)
    wrapped(torch.ones(1, 3)).sum().backward()
    del module, wrapped
    gc.collect()
    assert alive() is None


def test_bucket_size_is_checked() -> None:
    with World(1) as world:

        def run() -> Any:
            with pytest.raises(ValueError, match="bucket_mb=0"):
                DDP(nn.Linear(1, 1), bucket_mb=0)

        world.run(run)
