"""Dropout under tensor parallelism: replicas drop alike, shards do not; one process agrees."""

from collections import defaultdict
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensor_contract as contract
from labkit import GPT, Comm, World, recompute
from labkit.models.attention import Dropout, PlainAttention
from labkit.parallel.tensor import tensor_parallel as strategy
from labkit.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from labkit.parallel.tensor.tensor_parallel import ShardedForward, per_rank_rng, tensor_parallel
from small_models import Custom, difference
from tensor_contract import check_runs, predicted, with_sequence
from worlds import on_each_rank

WAYS = {"tensor": tensor_parallel, "sequence": with_sequence}
ways = pytest.mark.parametrize("way", WAYS)
Masks = dict[str, list[Tensor]]  # by the dropout's name: of each call


class Noted(Dropout):
    """Draws its mask and tells which; or plays those it is given."""

    def __init__(self, p: float, given: list[Tensor] | None = None):
        super().__init__(p)
        self.given, self.masks = given, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.given is not None:
            return x * self.given.pop(0) / (1 - self.p)
        y, mask = torch.native_dropout(x, self.p, True)
        self.masks.append(mask)
        return y


def with_noted_dropout(model: GPT, given: Masks | None = None) -> dict[str, Noted]:
    for block in model.blocks:
        block.attn.core = PlainAttention(block.dropout.p)
    found = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, Dropout):
            noted = Noted(module.p, None if given is None else given[name])
            model.set_submodule(name, noted)
            found[name] = noted
    return found


def trained(way: str, given: Masks | None = None, recompute: Any = None) -> Any:
    """On a rank: train with dropout; weights, losses, and the masks."""
    masks: dict[str, Noted] = {}

    def edit(model: nn.Module, comm: Comm) -> nn.Module:
        assert isinstance(model, GPT)
        masks.update(with_noted_dropout(model, given))
        torch.manual_seed(1)
        return model if way == "single" else WAYS[way](model, comm)

    run = contract.trained(edit, recompute, dropout=0.2)
    return run, {name: noted.masks for name, noted in masks.items()}


def put_together(masks: list[Masks], way: str) -> Masks:
    """The whole model's: replicas are equal; heads and parts of the sequence are not."""
    whole: Masks = defaultdict(list)
    for name in masks[0]:
        for parts in zip(*(one[name] for one in masks), strict=True):
            if "core" not in name and way == "tensor":
                assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs"
                whole[name].append(parts[0])
            else:
                assert not any(torch.equal(part, parts[0]) for part in parts[1:]), f"{name} agrees"
                whole[name].append(torch.cat(parts, dim=1))  # [b, h, s, s] or [b, s, w]
    return whole


def check_masks(world: World, way: str) -> list[Masks]:
    runs, masks = zip(*world.run(trained, way), strict=True)
    expected, _ = world.run(trained, "single", put_together(list(masks), way))[0]
    check_runs(list(runs), expected)
    return list(masks)


@ways
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_process_with_the_same_masks(world2: World, world3: World, size: int, way: str) -> None:
    masks = check_masks({2: world2, 3: world3}[size], way)
    dropped = torch.cat([mask.flatten() for one in masks[0].values() for mask in one])
    assert abs(dropped.double().mean() - 0.8) < 0.01


@ways
@pytest.mark.parametrize("what", ["full", "selective"])
def test_recompute_draws_the_same_masks(world2: World, way: str, what: Any) -> None:
    """The weights are those of training that keeps all, and the bytes add the forward's."""
    runs = [run for run, _ in world2.run(trained, way)]
    again = [run for run, _ in world2.run(trained, way, None, what)]
    for one, other in zip(again, runs, strict=True):
        check_runs([one], other)
        assert one.sent == predicted(2, way == "sequence", what == "full", dropout=True)


def test_dropout_of_replicas_alone_is_that_of_a_single_process(world2: World) -> None:
    """Nothing else draws, so a seed gives the masks of one process; with one rank, always."""

    def only_replicas(model: nn.Module, comm: Comm) -> nn.Module:
        for block in model.blocks:
            block.attn.core.dropout = 0.0
        torch.manual_seed(1)
        return model if comm.size == 1 else tensor_parallel(model, comm)

    def all_of_them(model: nn.Module, comm: Comm) -> nn.Module:
        torch.manual_seed(1)
        return model

    with World(1) as one:
        expected = one.run(contract.trained, only_replicas, dropout=0.2)[0]
        alone = one.run(contract.trained, all_of_them, dropout=0.2)
        cut = one.run(
            contract.trained, lambda m, c: tensor_parallel(all_of_them(m, c), c), dropout=0.2
        )
    check_runs(world2.run(contract.trained, only_replicas, dropout=0.2), expected)
    check_runs(cut, alone[0])


@on_each_rank("world2")
def test_nothing_is_dropped_in_evaluation() -> None:
    model = tensor_parallel(contract.model_of(dropout=0.2), Comm(), sequence=True).eval()
    state = torch.get_rng_state()
    tokens = torch.zeros(2, 12, dtype=torch.long)
    assert torch.equal(model(tokens), model(tokens)) and torch.equal(torch.get_rng_state(), state)


@on_each_rank("world2")
def test_own_numbers() -> None:
    """Others on each rank and in each block, the same from the same seed; what follows agrees. One
    rank alone draws as if there were no block."""
    comm, drawn = Comm(), []
    alone = [comm.subgroup([rank]) for rank in range(2)][comm.rank]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with per_rank_rng(alone):
        assert torch.equal(torch.rand(3), expected)
    for _ in range(2):
        torch.manual_seed(7)
        for _ in range(2):
            with per_rank_rng(comm):
                drawn.append(torch.rand(3).tolist())
            drawn.append(torch.rand(3).tolist())
    one, other = comm.all_gather_object(drawn)
    assert one[:4] == one[4:] and other[:4] == other[4:]
    assert one[1] == other[1] and one[3] == other[3]
    assert len({tuple(numbers) for numbers in (*one, *other)}) == 6


@pytest.mark.parametrize("cut", [False, True])
@on_each_rank("world2")
def test_a_nested_or_interrupted_call_leaves_the_region_whole(cut: bool) -> None:
    """What follows an inner call is the rank's own still, as is what follows a failed entry; of a
    layer that is cut, from its columns on."""
    comm, drawn = Comm(), []

    def forward(layer: Any, x: Tensor, inner: bool = False) -> Tensor:
        h = layer.up(x)
        if not inner:
            layer(x, inner=True)
            drawn.append(torch.rand(3))
        return layer.down(h)

    up, down = ColumnParallelLinear(4, 4, comm), RowParallelLinear(4, 4, comm)
    layer = Custom(forward, up=up, down=down, drop=nn.Dropout(0.5))
    layer.forward = ShardedForward(layer, comm, *(([up], down) if cut else ()))
    for interrupted in (False, True):
        torch.manual_seed(7)
        if interrupted:
            fails = patch.object(strategy, "per_rank_rng", side_effect=KeyboardInterrupt)
            with fails, pytest.raises(KeyboardInterrupt):
                layer(torch.ones(1, 4))
        layer(torch.ones(1, 4))
        drawn.append(torch.rand(3))
    one, other = comm.all_gather_object([x.tolist() for x in drawn])
    assert one[0] == one[2] != other[0] == other[2], "its own, inside"
    assert one[1] == one[3] == other[1] == other[3], "that of all, behind it"


@pytest.mark.parametrize("row_too", [True, False])
@pytest.mark.parametrize("again", [recompute, partial(checkpoint, use_reentrant=False)])
@on_each_rank("world2")
def test_a_part_of_a_layer_may_be_run_again(again: Any, row_too: bool) -> None:
    """A checkpoint inside of forward: the rerun sends, draws and saves what forward did."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        def mixed(x: Tensor) -> Tensor:
            h = layer.drop(layer.q(x) * layer.k(x).sigmoid() + layer.v(x))
            return layer.out(h) if row_too else h

        run = mixed if layer.plain else partial(again, mixed)
        return run(x) if row_too else layer.out(run(x))

    results = []
    for plain in (True, False):
        torch.manual_seed(3)
        parts: Any = {name: nn.Linear(8, 8) for name in ("q", "k", "v", "out")}
        model = Custom(forward, **parts, head_width=2, drop=nn.Dropout(0.5), plain=plain).double()
        tensor_parallel(model, Comm())
        torch.manual_seed(4)
        x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            model(x).square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        results.append(grads | {"x": x.grad, "drawn next": torch.rand(3)})
    assert difference(*results) < 1e-12
