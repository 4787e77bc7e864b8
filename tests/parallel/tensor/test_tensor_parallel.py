"""Tensor and sequence parallelism: the same model for every size, the bytes of the formula."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensor_contract as contract
from labkit import Comm, Link, Mesh, RankError, Text, World, ZeroOptimizer, autocast, listen, loss
from labkit.parallel.common.shards import shard_of
from labkit.parallel.tensor import layers
from labkit.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from small_models import difference
from tables import cases, raises
from tensor_contract import check_equal_to_single, check_with_bytes, model_of, with_sequence
from worlds import on_each_rank, on_ranks_of_its_own, world_fixture

WAYS = {"tensor": tensor_parallel, "sequence": with_sequence}
ways = pytest.mark.parametrize("way", WAYS)
world = world_fixture(
    sizes=[2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))], timeout_s=20
)


@ways
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_weights_losses_and_bytes(world: World, way: str, recompute: Any) -> None:
    check_with_bytes(world, WAYS[way], way == "sequence", recompute)


@ways
@pytest.mark.parametrize("changes", [{"kv_heads": 6}, {"vocab": 257}, {"tied": False}], ids=str)
def test_other_models(world: World, way: str, changes: dict[str, Any]) -> None:
    if world.size == 4 and "kv_heads" in changes:
        changes = {"kv_heads": 4}
    check_equal_to_single(world, WAYS[way], **changes)


@on_each_rank("world2")
def test_the_formula_of_the_paper() -> None:
    """8 (t-1)/t b s w elements a layer, and 10 (t-1)/t: what one layer more adds."""
    small = 6 * contract.WIDTH * 2 / 2 / (3 * 8 * contract.WIDTH)  # gradients of norms, biases
    for sequence, expected in ((False, 8 / 2), (True, 10 / 2 + small)):
        sent = []
        for depth in (1, 2):
            model = tensor_parallel(model_of(depth=depth), Comm(), sequence=sequence)
            with listen() as events:
                model(torch.zeros(3, 8, dtype=torch.long)).sum().backward()
            sent.append(sum(event.bus_bytes for event in events))
        assert (sent[1] - sent[0]) / 8 / (3 * 8 * contract.WIDTH) == expected


@pytest.mark.slow
def test_parameters_that_arrive_during_forward_are_waited_for() -> None:
    """q multiplies for k and v, too, whose new weights may still be on a slow wire."""

    def run(stage: int) -> None:
        mesh = Mesh(dp=2, tp=2)
        expected = contract.trained(None).weights
        model = tensor_parallel(model_of(), mesh.tp)
        options = {"bucket_mb": 0.0001, "gather_in": model, "lr": 1e-2, "weight_decay": 0.1}
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage, mesh.dp, **options)
        for step in range(contract.STEPS):
            batch = Text().batch(step, contract.ROWS, contract.LENGTH)
            batch = batch.slice(mesh.dp.rank, mesh.dp.size)
            optimizer.zero_grad()
            loss(model(batch.x), batch).backward()
            optimizer.step()
        optimizer.wait()
        weights = {name: contract.whole(p) for name, p in model.named_parameters()}
        assert difference(weights, expected) <= contract.AGREE

    with World(4, timeout_s=20, link=Link(gbps=0.005)) as slow:
        for stage in (1, 2):
            slow.run(run, stage)


@ways
@on_each_rank("world2")
def test_logits_that_stay_where_they_are(way: str) -> None:
    """Each rank has those of its part of the vocabulary, and the loss of all."""
    comm, gradients = Comm(), []
    batch = Text().batch(0, contract.ROWS, contract.LENGTH)
    for gather in (True, False):
        how = {"sequence": way == "sequence", "gather_logits": gather}
        model = tensor_parallel(model_of(vocab=257), comm, **how)
        logits = model(batch.x)
        assert logits.shape[-1] == (257 if gather else 129)
        if gather:
            loss(logits, batch).backward()
        else:
            layers.vocab_parallel_cross_entropy(logits, batch.y, comm, vocab=257).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert difference(*gradients) <= contract.AGREE


@on_each_rank("world2")
def test_a_copy_is_a_model_of_its_own() -> None:
    model = tensor_parallel(model_of(dropout=0.1), Comm(), sequence=True).eval()
    tokens = torch.arange(24).view(2, 12)
    before, other = model(tokens), deepcopy(model)
    assert torch.equal(other(tokens), before)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    assert other.head.weight is other.embed.tokens.weight
    assert torch.equal(model(tokens), before)
    after = other(tokens)
    assert not torch.allclose(after, before)
    after.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())
    assert [*map(shard_of, other.parameters())] == [*map(shard_of, model.parameters())]


@on_each_rank("world2")
def test_what_a_rank_holds() -> None:
    """1/t of what is cut, the rest whole; every part has its mark."""
    comm, whole = Comm(), model_of()
    model = tensor_parallel(model_of(), comm)
    for name, p in model.named_parameters():
        was, shard = whole.get_parameter(name), shard_of(p)
        if name.endswith(("out.bias", "down.bias", "positions.weight")) or "norm" in name:
            assert shard is None and torch.equal(p, was)
            continue
        assert shard is not None and p.numel() == was.numel() // 2 and p.is_contiguous()
        assert p.untyped_storage().nbytes() == p.nbytes, "the whole is not kept alive"
        assert (shard.start, shard.stop) == (comm.rank * len(p), (comm.rank + 1) * len(p)) or (
            shard.dim == 1 and name.endswith(("out.weight", "down.weight"))
        )
        assert torch.equal(p, was.narrow(shard.dim, shard.start, shard.stop - shard.start))
    assert model.head.weight is model.embed.tokens.weight


@on_each_rank("world2")
def test_a_model_starts_as_rank_0s() -> None:
    model = model_of()
    if Comm().rank == 1:
        nn.init.zeros_(model.norm.bias)
        nn.init.zeros_(model.blocks[0].mlp.up.weight)
    tensor_parallel(model, Comm())
    assert bool(model.norm.bias.any() and model.blocks[0].mlp.up.weight.all())


@pytest.mark.parametrize("sequence", [False, True])
def test_the_input_gradient_travels_during_compute(world2: World, sequence: bool) -> None:
    contract.check_overlap(world2, sequence)


@on_each_rank("world2")
def test_one_input_is_gathered_and_its_gradient_sent_once() -> None:
    """q, k and v: not three times."""
    model: Any = tensor_parallel(model_of(), Comm(), sequence=True)
    x = torch.randn(2, 6, contract.WIDTH, dtype=torch.float64, requires_grad=True)
    with listen() as events:
        model.blocks[0].attn(x).sum().backward()
    gather, scatter, reduce = "all_gather", "reduce_scatter", "all_reduce"
    forward, backward = [gather, scatter], [reduce, gather, gather, scatter]  # of the bias first
    assert sorted(event.op for event in events) == sorted(forward + backward)


@on_each_rank("world2")
def test_layers_without_a_model() -> None:
    """Used twice, without bias, with a frozen weight, of two dims; by sizes as by `from_linear`."""
    comm, near = Comm(), partial(torch.testing.assert_close, rtol=0, atol=1e-12)
    torch.manual_seed(0)
    up, down = nn.Linear(6, 8).double(), nn.Linear(8, 6, bias=False).double()
    up.weight.requires_grad_(False)
    column = ColumnParallelLinear.from_linear(up, comm)
    row = RowParallelLinear.from_linear(down, comm)
    assert not column.weight.requires_grad and "(4, 6) of (8, 6)" in repr(column)
    for shape in ((6,), (3, 6), (2, 3, 6)):
        results = []
        for first, last in ((up, down), (column, row)):
            torch.manual_seed(1)
            x = torch.randn(shape, dtype=torch.float64).requires_grad_()
            once = last(torch.tanh(first(x)))
            last(torch.tanh(first(once))).square().sum().backward()
            results.append((once.detach(), x.grad))
        near(*results)
    near(column.bias.grad, up.bias.grad.chunk(2)[comm.rank])
    near(row.weight.grad, down.weight.grad.chunk(2, 1)[comm.rank])
    torch.manual_seed(0)
    assert torch.equal(ColumnParallelLinear(6, 8, comm).weight.double(), column.weight)


@ways
@pytest.mark.parametrize("casting", ["labkit", "torch", "module"])
@on_each_rank("world2")
def test_bfloat16(way: str, casting: str) -> None:
    """Autocast or bf16 modules: layers send 2 bytes, gradients have their parameters' dtype."""
    tokens = torch.arange(24).view(2, 12)
    expected = float(model_of()(tokens).logsumexp(-1).mean())
    model: Any = WAYS[way](model_of().float(), Comm())
    x = torch.ones(2, 12 // (1 + (way == "sequence")), contract.WIDTH, requires_grad=True)
    if casting == "module":
        model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    cast = {
        "labkit": lambda: autocast(torch.bfloat16),
        "torch": lambda: torch.autocast("cpu", torch.bfloat16),
        "module": torch.enable_grad,
    }[casting]
    with cast():
        value = model(tokens).float().logsumexp(-1).mean()
    value.backward()
    for p in model.parameters():
        assert p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all()
    with listen() as events:
        with cast():
            y = model.blocks[0](x)
        y.sum().backward()
    sent = [event.dtype for event in events if len(event.shape) == 3]
    assert sent == ["bfloat16"] * (10 if way == "sequence" else 4)
    assert abs(float(value) - expected) < 0.05 * abs(expected)


@on_each_rank("world3")
def test_heads_that_do_not_divide() -> None:
    for changes, words in (
        ({"heads": 8}, "8 query heads of blocks.0.attn.*3 tensor.*a rank count that divides 8"),
        ({"kv_heads": 4}, "4 key-value heads .*3 tensor-.*a rank count that divides 4"),
    ):
        raises(words, tensor_parallel, model_of(**changes), Comm())
    words = r"has size 10,.* 3 ranks; choose a multiple of 3, such as 9 or 12$"
    raises(words, ColumnParallelLinear, 4, 10, Comm())
    raises(words, RowParallelLinear, 10, 4, Comm())


@on_each_rank("world2")
def test_what_cannot_be_cut() -> None:
    model, whole = tensor_parallel(model_of(), Comm()), nn.Sequential(nn.Linear(2, 2))
    raises(("blocks.0.attn.q is already sharded over 2 ranks",), tensor_parallel, model, Comm())
    words = "Sequential has no layer that tensor_parallel can shard"
    raises(words, tensor_parallel, whole, Comm())
    model = tensor_parallel(model_of(), Comm(), sequence=True)
    words = "has size 11, which cannot be split evenly over 2 ranks.*10 or 12"
    raises(words, model, torch.zeros(2, 11, dtype=torch.long))


@on_each_rank("world2")
def test_fixed_positions_are_sharded_too() -> None:
    """An embedding whose weight is a buffer, called by position and by keyword."""
    model, tokens = model_of(), torch.arange(24).reshape(2, 12) % contract.VOCAB
    positions, weight = model.embed.positions, model.embed.positions.weight.detach()
    del positions.weight
    positions.register_buffer("weight", weight)
    expected = model(tokens)
    model = tensor_parallel(model, Comm(), sequence=True)
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-10)
    assert positions(input=torch.arange(12)).shape == (6, contract.WIDTH)


@cases(
    ("by name", "the input differs between the ranks(.|\n)*same batch"),
    ("by position", "the input differs between the ranks(.|\n)*same batch"),
    ("random state", "the random state differs(.|\n)*the same seed"),
)
def test_what_differs_between_the_ranks_is_found(what: str, words: str, world2: World) -> None:
    def run() -> None:
        model = tensor_parallel(model_of(dropout=0.1), Comm())
        tokens = torch.full((2, 12), Comm().rank)
        if what == "random state":
            torch.manual_seed(Comm().rank)
            tokens.zero_()
        model(tokens=tokens) if what == "by name" else model(tokens)

    raises(words, world2.run, run, error=RankError)


@on_ranks_of_its_own(2, check=False)
def test_without_checks_nothing_is_compared() -> None:
    model = tensor_parallel(model_of(), Comm())
    assert model(torch.full((2, 12), Comm().rank)).isfinite().all()
