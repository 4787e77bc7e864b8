"""Worlds on GPUs: NCCL with one for each rank, gloo with several ranks on one."""

import gc
from pathlib import Path

import pytest
import torch

from labkit import DDP, GPT, MLP, Batch, Comm, Single, World, attach, loss, record
from labkit.compare import compare
from labkit.trace import Trace
from labkit.training import Task
from laws import broken_laws
from small_models import take_steps

pytestmark = pytest.mark.gpu


def test_one_rank_takes_nccl_and_its_gpu() -> None:
    with World(1) as world:
        assert (world.backend, world.device) == ("nccl", "cuda")

        def on_gpu() -> tuple[str, torch.Tensor]:
            x = torch.ones(5, device=attach().device)
            Comm().all_reduce(x, "mean")
            return x.device.type, x

        (device, x), *_ = world.run(on_gpu)
    assert device == "cuda"
    assert x.device.type == "cpu" and x.tolist() == [1.0] * 5, "it comes back as a CPU tensor"


def test_ranks_share_a_gpu_over_gloo_and_stage_through_the_host() -> None:
    size = torch.cuda.device_count() + 1
    with World(size) as world:
        assert (world.backend, world.device) == ("gloo", "cuda")
        assert "share" in world.picked

        def collectives() -> list[torch.Tensor]:
            comm, device = Comm(), attach().device
            total = torch.full((100_003,), float(comm.rank), device=device)
            handle = comm.all_reduce(total, async_op=True)
            half = torch.full((7, 3), 1.5, device=device, dtype=torch.bfloat16).t()
            comm.all_reduce(half)
            gathered = torch.empty(comm.size, 2, device=device)
            comm.all_gather_into_tensor(gathered, torch.full((2,), float(comm.rank), device=device))
            assert handle is not None
            handle.wait()
            return [total[:3], half, gathered]

        for total, half, gathered in world.run(collectives):
            assert total.tolist() == [size * (size - 1) / 2] * 3
            assert half.unique().tolist() == [1.5 * size]
            assert gathered[:, 0].tolist() == list(range(size))


def test_ddp_on_a_shared_gpu_equals_single() -> None:
    def train(strategy: type[Single] | type[DDP]) -> torch.Tensor:
        comm, device = Comm(), attach().device
        torch.manual_seed(0)
        module = torch.nn.Linear(7, 3).double().to(device)
        model = strategy(module, comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.randn(12, 7, generator=torch.Generator().manual_seed(1)).double().to(device)
        mine = rows.chunk(comm.size)[comm.rank]
        take_steps(optimizer, lambda _: model(mine).square().mean(), 5)
        return module.weight.detach()

    with World(1) as one, World(torch.cuda.device_count() + 1) as world:
        (oracle,) = one.run(train, Single)
        if 12 % world.size:
            pytest.skip("the rows must be even here")
        for weight in world.run(train, DDP):
            torch.testing.assert_close(weight, oracle, atol=1e-10, rtol=0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_strategy_equals_one_process_and_its_formulas(ranks: int, tmp_path: Path) -> None:
    """In losses, float64 weights, and the bytes that a rank holds and sends: one rank over NCCL,
    several that share a GPU over gloo."""
    task = Task(model="1M", steps=3, rows=8, length=32)
    found = {x.strategy: x.problems for x in compare(task, every=True, ranks=ranks, out=tmp_path)}
    assert not any(found.values()) and len(found) >= 11, found


def recorded_training() -> Trace:
    """Four steps of DDP, the last in detail."""
    me = attach()
    torch.manual_seed(0)
    module = GPT.preset("1M", vocab=256, context=64).to(me.device)
    model = DDP(module, bucket_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8, 65), device=me.device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 8 * 64)
    with record(detail_step=3) as trace:
        take_steps(optimizer, lambda _: loss(model(batch.x), batch), 4)
    return trace


@pytest.mark.parametrize("ranks", ["one", "shared"])
def test_a_recorded_run_keeps_the_laws_and_agrees_with_cuda(ranks: str) -> None:
    size = 1 if ranks == "one" else torch.cuda.device_count() + 1
    with World(size) as world:
        for trace in world.run(recorded_training):
            (one,) = trace.ranks.values()
            assert one.device.startswith("cuda") and one.complete
            assert broken_laws(trace) == []
            computing = [x for x in one.spans if x.phase in ("forward", "backward") and not x.depth]
            assert all(x.ended_s > x.began_s for x in computing)


def test_memory_by_category_is_what_cuda_has_allocated() -> None:
    """Up to the rounding of the allocator, 512 bytes a tensor."""

    def on_rank() -> tuple[int, int, int]:
        me = attach()
        gc.collect()
        others = torch.cuda.memory_allocated()  # the second time: cuBLAS's workspaces
        module = MLP([64, 128, 8]).to(me.device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        x = torch.ones(32, 64, device=me.device)
        with record(detail_step=1) as trace:
            take_steps(optimizer, lambda _: module(x).sum())
        torch.cuda.synchronize()
        last = trace.step(1).ranks[me.rank].memory[-1]
        tensors = 4 * len(list(module.parameters())) + 8
        return sum(last.held_bytes), torch.cuda.memory_allocated() - others, tensors

    with World(1) as world:
        world.run(on_rank)
        ((ours, cuda, tensors),) = world.run(on_rank)
    assert ours <= cuda <= ours + 512 * tensors, (ours, cuda)
