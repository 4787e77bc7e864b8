"""Copies, pickles, `torch.compile`, process groups: as with torch's wrappers, or refused."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import labkit
from command import python
from labkit import DDP, Comm, Mesh, NaiveDDP, ParameterServer, Single, World, ZeroOptimizer, listen
from small_models import take_steps
from tables import raises
from worlds import on_each_rank, world_fixture

WRAPPERS: list[Any] = [DDP, NaiveDDP]
world = world_fixture(sizes=[1, 2, 3])


def net() -> nn.Module:
    """Tied weights, a frozen layer, a module used twice and a parameter that nobody uses."""
    torch.manual_seed(0)
    return Net().double()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.tied(torch.tanh(self.first(self.first(x))))))
        return self.norm(x)


def batch(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(model: nn.Module, seed: int, steps: int = 2, accumulate: bool = False) -> list[Any]:
    """SGD: last gradients, weights and buffers (with `no_sync` torch broadcasts those later)."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                model(batch(seed + step + 50)).square().mean().backward()
        model(batch(seed + step)).sigmoid().square().mean().backward()
        last = gradients(model)
        optimizer.step()
    buffers = () if accumulate else model.buffers()
    return [*last, *(x.detach().clone() for x in (*model.parameters(), *buffers))]


def saved(x: Any) -> Any:
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


assert_equal = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)  # of lists
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "AveragedModel": lambda x: AveragedModel(x).module,
}
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DDP,
    "small buckets": partial(DDP, bucket_mb=1e-5),
    "static_graph": partial(DDP, static_graph=True, bucket_mb=1e-5),
    "no overlap, torch's keyword": partial(DDP, overlap=False, find_unused_parameters=True),
    "NaiveDDP": NaiveDDP,
}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [False, True])
@on_each_rank("world")
def test_a_copy_averages_as_torchs_copy_and_so_does_its_original(accumulate: bool) -> None:
    torchs = DistributedDataParallel(net(), find_unused_parameters=True)
    train(torchs, 0, accumulate=accumulate)
    expected_copy = train(copy.deepcopy(torchs), 7, accumulate=accumulate)
    expected_original = train(torchs, 20, accumulate=accumulate)
    for wrap in WAYS.values():
        for copied_by in COPIES.values():
            original = wrap(net())
            train(original, 0, accumulate=accumulate)
            copied = copied_by(original)
            assert type(copied) is type(original)
            assert_equal(train(copied, 7, accumulate=accumulate), expected_copy)
            assert_equal(train(original, 20, accumulate=accumulate), expected_original)
            del copied
            assert_equal(train(copy.deepcopy(original), 3), train(original, 3))


@on_each_rank("world")
def test_a_copy_averages_when_its_original_is_gone() -> None:
    for wrap in (*WRAPPERS, Single):
        model = wrap(net())
        copied = copy.deepcopy(copy.deepcopy(model))
        expected = train(model, 0)
        del model
        gc.collect()
        assert_equal(train(copied, 0), expected)


def counting(flat: torch.Tensor, comm: Comm, async_op: bool) -> Any:
    counting.calls += 1
    return comm.all_reduce(flat, async_op=async_op)


@on_each_rank("world2")
def test_a_copy_has_the_communication_hook() -> None:
    coarse = partial(DDP, hook=labkit.compressed(torch.bfloat16))
    for copied_by in COPIES.values():
        counting.calls = 0
        assert_equal(train(copied_by(DDP(net(), hook=counting)), 0), train(DDP(net()), 0))
        assert counting.calls == 2
        assert_equal(train(copied_by(coarse(net())), 0), train(coarse(net()), 0))


@on_each_rank("world2")
def test_rank_0_alone_may_copy_average_save_and_load(tmp_path: Path) -> None:
    model = DDP(net(), bucket_mb=1e-5)
    train(model, 0)
    if dist.get_rank() == 0:
        with listen() as events:
            average = AveragedModel(model)
            average.requires_grad_(False)
            average.update_parameters(model)
            average.eval()
            assert torch.equal(copy.deepcopy(saved(average))(batch()), average(batch()))
            torch.save(model, tmp_path / "model.pt")
        assert not events
    Comm().barrier()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_equal(train(loaded, 5), train(model, 5))


@on_each_rank("world4")
def test_over_a_subgroup_a_copy_trains_and_a_pickle_evaluates() -> None:
    mesh = Mesh(dp=2, tp=2)
    model = DDP(net(), mesh.dp)
    assert_equal(train(copy.deepcopy(model), 0), train(model, 0))
    loaded = saved(model)
    raises(r"over ranks \[\d, \d\] was pickled, and a process", loaded, batch(), error=RuntimeError)
    torch.testing.assert_close(loaded.eval()(batch()), model.eval()(batch()))


def test_a_model_returned_from_the_ranks_evaluates_and_does_not_train(world2: World) -> None:
    returned = world2.run(lambda: DDP(net()))[1]
    returned.eval()(torch.ones(4, 3).double())
    words = "was pickled, and a process group cannot be pickled"
    raises(words, returned.train(), torch.ones(4, 3).double(), error=RuntimeError)


@on_each_rank("world2")
def test_a_shallow_copy_would_be_a_second_owner_and_is_refused() -> None:
    for wrap in WRAPPERS:
        raises("already belongs to a .*; wrap a module only once", copy.copy, wrap(net()))


def served(model: Any, seed: int) -> list[torch.Tensor]:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if isinstance(model, ParameterServer):
        optimizer = model.pull_after(optimizer)
    take_steps(optimizer, lambda step: model(batch(seed + step)).square().mean())
    return [p.detach().clone() for p in model.parameters()]


@on_each_rank("world2")
def test_a_copied_parameter_server_serves_with_an_optimizer_of_its_own() -> None:
    model = ParameterServer(net())
    served(model, 0)
    copied = copy.deepcopy(model)
    raises(("model.pull_after(torch.optim",), lambda: copied(batch()).square().mean().backward())
    expected = served(DDP(copy.deepcopy(model.module)), 5)
    for copied in (copy.deepcopy(model), saved(model)):
        assert_equal(served(copied, 5), expected)


def asynchronous(model: labkit.AsyncParameterServer) -> list[torch.Tensor]:
    model.run(lambda: take_steps(model, lambda step: model(batch(step)).square().mean(), 3))
    return [p.detach().clone() for p in model.parameters()]


@on_each_rank("world2")
def test_a_copied_asynchronous_server_goes_on_where_the_original_was() -> None:
    model = labkit.AsyncParameterServer(net(), torch.optim.SGD, lr=0.1, momentum=0.9)
    asynchronous(model)
    copies = [copy.deepcopy(model), saved(model)]
    expected = asynchronous(model)
    for copied in copies:  # the state of the optimizer, too
        assert_equal(asynchronous(copied), expected)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = batch(seed).to(next(model.parameters()).dtype)
    take_steps(optimizer, lambda _: model(x).square().mean(), 1)


@on_each_rank("world2")
def test_copied_master_weights_train_on_to_the_bit() -> None:
    model = nn.Linear(3, 3).bfloat16()
    optimizer = labkit.MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step_of(model, optimizer, 0)
    both = model, optimizer
    copies = [COPIES[by](both) for by in ("deepcopy", "torch.save", "pickle")]
    for trained in (both, *copies):
        for seed in range(1, 9):
            step_of(*trained, seed)
    for copied, copied_optimizer in copies:
        assert type(copied_optimizer) is labkit.MasterWeights
        assert_equal(list(copied.parameters()), list(model.parameters()))
        masters = copied_optimizer.state_dict()["masters"]
        assert_equal(masters, optimizer.state_dict()["masters"])
        assert any((x != x.bfloat16()).any() for x in masters)  # in fp32
    scheduler.step()
    alone = copy.deepcopy(optimizer)  # of its own parameters, as torch's
    before = [p.clone() for p in model.parameters()]
    for p in alone.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    alone.step()
    assert_equal(list(model.parameters()), before)


@pytest.mark.parametrize("stage", [1, 2])
@on_each_rank("world2")
def test_a_zero_optimizer_is_not_copied_but_its_state_is(stage: int) -> None:
    model = net()
    made = partial(ZeroOptimizer, optimizer_cls=torch.optim.AdamW, stage=stage, lr=1e-2)
    optimizer = made(model.parameters(), gather_in=model)
    step_of(model, optimizer, 0)
    optimizer.wait()
    for copied_by in (copy.copy, copy.deepcopy, pickle.dumps, saved):
        words = "ZeroOptimizer cannot be copied or pickled; create one"
        raises((words,), copied_by, optimizer, error=TypeError)
    copies = [copied_by((model, optimizer.state_dict())) for copied_by in (copy.deepcopy, saved)]
    step_of(model, optimizer, 1)
    optimizer.wait()
    for copied, state in copies:  # as the error says
        other = made(copied.parameters())
        other.load_state_dict(state)
        step_of(copied, other, 1)
        assert_equal(list(copied.parameters()), list(model.parameters()))


@on_each_rank("world2")
def test_a_pipeline_is_not_copied_nor_called_but_its_module_is() -> None:
    layers = nn.Sequential(*[nn.Linear(3, 3).double() for _ in range(4)])
    made = labkit.Pipeline(labkit.split(layers, Comm().size), loss_fn=nn.functional.mse_loss)
    for copied_by in (copy.deepcopy, pickle.dumps, saved):
        words = "Pipeline cannot be copied or pickled; copy pipeline"
        raises((words,), copied_by, made, error=TypeError)
    average = AveragedModel(made.module)
    made.step(torch.ones(8, 3).double(), torch.zeros(8, 3).double())
    average.update_parameters(made.module)
    assert_equal(list(average.module.parameters()), list(made.module.parameters()))
    raises(("call step(x, y)",), made, torch.ones(8, 3), error=TypeError)


def test_fp32_gradients_are_not_copied() -> None:
    made = labkit.Fp32Gradients(nn.Linear(3, 3).parameters())
    words = "Fp32Gradients cannot be copied or pickled; create one"
    raises((words,), copy.deepcopy, made, error=TypeError)


@on_each_rank("world2")
def test_a_copied_scaler_decides_with_all_ranks() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = labkit.GradScaler(init_scale=8.0, growth_interval=1)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    for copied_by in (copy.deepcopy, saved):
        raises(("after update(), before unscale_()",), copied_by, scaler, error=RuntimeError)
    scaler.step(optimizer)
    scaler.update()
    for copied in (copy.deepcopy(scaler), saved(scaler)):
        assert copied.get_scale() == 16.0
        if dist.get_rank() == 0:  # all ranks skip what one of them must
            model.weight.grad = torch.full((3, 3), torch.inf)
        copied.scale(torch.ones(()))
        before = model.weight.clone()
        copied.step(optimizer)
        copied.update()
        assert torch.equal(model.weight, before)
        assert (copied.get_scale(), scaler.get_scale()) == (8.0, 16.0)


@on_each_rank("world2")
def test_a_copied_mesh_communicates_and_a_pickled_one_says_why_not() -> None:
    mesh = Mesh(dp=1, tp=2)
    x = torch.ones(1)
    copy.deepcopy(mesh).tp.all_reduce(x)
    copy.copy(mesh.tp).all_reduce(x)
    assert x.item() == 4
    loaded = saved(mesh)
    assert loaded.coordinates() == mesh.coordinates()
    words = r"all_reduce: this Comm of rank \d over ranks \[0, 1\]"
    raises(words, lambda: loaded.tp.all_reduce(x), error=RuntimeError)


def taking(comm: Any) -> list[Callable[[], Any]]:
    def linear() -> nn.Module:
        return nn.Linear(2, 2)

    sgd = torch.optim.SGD
    stages = [linear() for _ in range(2)]
    return [
        lambda: DDP(linear(), comm),
        lambda: NaiveDDP(linear(), comm),
        lambda: ParameterServer(linear(), comm),
        lambda: labkit.AsyncParameterServer(linear(), sgd, comm, lr=0.1),
        lambda: ZeroOptimizer(linear().parameters(), sgd, comm=comm, lr=0.1),
        lambda: labkit.Pipeline(stages, comm, loss_fn=nn.functional.mse_loss),
        lambda: labkit.tensor_parallel(labkit.GPT.preset("tiny"), comm),
        lambda: labkit.context_parallel(labkit.GPT.preset("tiny"), comm),
        lambda: labkit.ColumnParallelLinear(2, 2, comm),
        lambda: labkit.VocabParallelEmbedding(4, 2, comm),
        lambda: labkit.Fp32Gradients(linear().parameters(), comm),
        lambda: labkit.GradScaler(comm=comm),
        lambda: Mesh(comm, dp=2),
    ]


@on_each_rank("world2")
def test_a_process_group_is_taken_for_its_comm() -> None:
    for make in taking(dist.group.WORLD):
        made = make()
        parts = made.modules() if isinstance(made, nn.Module) else [made]
        comms = [part.comm for part in parts if hasattr(part, "comm")]
        assert comms
        assert all(type(comm) is Comm and comm.size == 2 for comm in comms)
    assert_equal(train(DDP(net(), dist.group.WORLD), 0), train(DDP(net()), 0))
    own = [dist.new_group([rank]) for rank in range(2)]  # a subgroup of this rank alone
    assert_equal(train(DDP(net(), own[dist.get_rank()]), 0), train(Single(net()), 0))
    for make in taking(own[1 - dist.get_rank()]):
        raises("this rank is not a member of the group", make)


@on_each_rank("world2")
def test_an_invalid_group_is_refused_in_one_sentence() -> None:
    words = "is not a group of ranks; pass a Comm, such as mesh.dp"
    for wrong in ([0], Mesh(dp=2), "cuda", False):
        for make in taking(wrong):
            raises((words,), make, error=TypeError)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_each_rank("world2")
def test_a_compiled_module_with_buffers_averages(backend: str) -> None:
    for wrap in (DDP, partial(DDP, bucket_mb=1e-5), NaiveDDP):
        expected = train(wrap(net()), 0)
        inside: Any = wrap(torch.compile(net(), backend=backend))
        assert_equal(train(inside, 0), expected)
        model = wrap(net())
        outside: Any = torch.compile(model, backend=backend)
        assert_equal(train(outside, 0, steps=2)[:9], train(wrap(net()), 0, steps=2)[:9])
    model = DDP(net())
    model.compile(backend=backend)
    assert_equal(train(model, 0), train(DDP(net()), 0))
    with listen() as events:
        train(model, 0, steps=1)
    assert events
    assert all(", from test_faults_copies.py" in event.source for event in events)


@on_each_rank("world2")
def test_a_compiled_tensor_parallel_model_computes_the_same() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        up = labkit.ColumnParallelLinear(3, 8, Comm())
        return nn.Sequential(up, nn.GELU(), labkit.RowParallelLinear(8, 3, Comm())).double()

    x = torch.ones(4, 3).double()
    model, expected = made(), made()
    torch.compile(model, backend="eager")(x).square().mean().backward()
    expected(x).square().mean().backward()
    assert_equal(gradients(model), gradients(expected))


def test_communication_does_not_load_the_compiler() -> None:
    code = (
        "import sys, torch, labkit; comm = labkit.attach().comm; comm.all_reduce(torch.ones(1)); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    python("-c", code)
