"""Checkpoints of tensor-parallel models: from any layout into any other, and into a plain model."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from checkpoint_cases import check_written, written_by
from labkit import DDP, Mesh, RankError, World, ZeroOptimizer, load_checkpoint, save_checkpoint
from labkit.parallel.common.shards import Shard, mark_shard
from shard_cases import ADAM, STRATEGIES, VOCAB, alone, built, cut, fresh, train, whole_of
from small_models import difference
from tables import raises
from worlds import on_each_rank

AGREE = 1e-10
LAYOUTS = {  # every strategy, tensor sizes 1, 2 and 4
    f"{strategy}-{dp}x{tp}": (strategy, {"dp": dp, "tp": tp})
    for strategy, dp, tp in [
        ("plain", 1, 4), ("ddp", 2, 2), ("zero-1", 2, 2), ("zero-2", 2, 2), ("zero-3", 2, 2),
        ("masters", 2, 2), ("zero-3", 4, 1), ("zero-1", 1, 4),
    ]
}  # fmt: skip
NAMES = list(LAYOUTS)
ALWAYS = {"plain-1x4", "ddp-2x2", "zero-3-2x2"}  # the others in the slow tests
EARLY, LATE = range(3), range(3, 6)


def save(strategy: str, axes: dict[str, int], folder: str) -> None:
    mesh = Mesh(**axes)
    model, optimizer = built(strategy, mesh)
    train(model, optimizer, mesh.dp, EARLY)
    save_checkpoint(folder, model, optimizer, step=3)


def load_and_go_on(
    strategy: str, axes: dict[str, int], folder: str, step: int | None = 3
) -> list[float]:
    """Other weights, another state, other hyperparameters: all has to come from the checkpoint."""
    mesh = Mesh(**axes)
    model, optimizer = built(strategy, mesh, partial(torch.optim.AdamW, lr=3e-3), seed=1)
    train(model, optimizer, mesh.dp, range(7, 8))
    assert load_checkpoint(folder, model, optimizer).step == step
    return train(model, optimizer, mesh.dp, LATE)


def plain_after_early(make: Any = ADAM) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = alone(make)
    train(model, optimizer, None, EARLY)
    return model, optimizer


@cache
def expected_losses() -> list[float]:
    return train(*plain_after_early(), None, LATE)


@cache
def expected_entries() -> dict[str, Any]:
    return written_by(*plain_after_early())


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in ALWAYS else pytest.mark.slow) for x in NAMES]
)
def test_any_layout_is_written_as_the_plain_model_which_goes_on_from_it_as_others_do(
    world4: World, name: str, tmp_path: Path
) -> None:
    """And its names, shapes and elements are those of the plain model."""
    world4.run(save, *LAYOUTS[name], str(tmp_path))
    check_written(tmp_path / "step_00000003", expected_entries())
    model, optimizer = alone(partial(torch.optim.AdamW, lr=1.0), seed=2)
    load_checkpoint(tmp_path, model, optimizer)
    expected = expected_losses()
    assert train(model, optimizer, None, LATE) == pytest.approx(expected, abs=AGREE, rel=0)
    for further in (0, 1, 3):
        other = NAMES[(NAMES.index(name) + further) % len(NAMES)]
        for losses in world4.run(load_and_go_on, *LAYOUTS[other], str(tmp_path)):
            assert losses == pytest.approx(expected, abs=AGREE, rel=0), other


def test_three_ranks_load_what_one_process_saved_and_the_other_way_round(
    world3: World, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, *plain_after_early(), step=3)
    for losses in world3.run(load_and_go_on, "plain", {"dp": 1, "tp": 3}, str(tmp_path)):
        assert losses == pytest.approx(expected_losses(), abs=AGREE, rel=0)
    world3.run(save, "plain", {"dp": 1, "tp": 3}, str(tmp_path / "cut"))
    model, optimizer = alone(seed=4)
    load_checkpoint(tmp_path / "cut", model, optimizer)
    losses = train(model, optimizer, None, LATE)
    assert losses == pytest.approx(expected_losses(), abs=AGREE, rel=0)


def test_every_layout_loads_what_torchs_own_save_wrote(world4: World, tmp_path: Path) -> None:
    model, optimizer = plain_after_early()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    for name in NAMES[:5]:
        for losses in world4.run(load_and_go_on, *LAYOUTS[name], str(tmp_path), step=None):
            assert losses == pytest.approx(expected_losses(), abs=AGREE, rel=0), name


@pytest.mark.parametrize("strategy", ["plain", "zero-1", "zero-3"])
def test_padding_is_not_written_and_not_read(world4: World, strategy: str, tmp_path: Path) -> None:
    def run() -> list[float]:
        mesh = Mesh(dp=1, tp=4)
        model = cut(fresh(), mesh.tp)
        rows = min(max(VOCAB - 2 * mesh.tp.rank, 0), 2)
        with torch.no_grad():
            model.rows.weight[rows:] = 77.0
        wrapped, optimizer = STRATEGIES[strategy](model, mesh.dp, ADAM)
        save_checkpoint(tmp_path, wrapped, optimizer)
        train(wrapped, optimizer, mesh.dp, EARLY)
        before = whole_of(wrapped)["rows.weight"]
        load_checkpoint(tmp_path, wrapped, optimizer)
        assert not torch.equal(whole_of(wrapped)["rows.weight"], before)
        state = wrapped.full_state_dict() if strategy == "zero-3" else model.state_dict()
        return state["rows.weight"][rows:].flatten().tolist()

    for padding in world4.run(run):
        assert all(x == pytest.approx(77, abs=0.1) for x in padding)
    reader = dcp.FileSystemReader(tmp_path / "step_00000000")
    stored = {"model.rows.weight": torch.empty(VOCAB, 6, dtype=torch.float64)}
    dcp.load(stored, storage_reader=reader, no_dist=True)
    assert torch.equal(stored["model.rows.weight"], fresh().rows.weight)
    entries = reader.read_metadata().state_dict_metadata
    assert entries["model.cuts.weight"] == entries["model.rows.weight"]  # tied: the bytes once


def test_state_that_is_new_here_has_zeros_for_padding(world4: World, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, *plain_after_early())

    def run() -> float:
        mesh = Mesh(dp=1, tp=4)
        model, optimizer = built("plain", mesh)
        load_checkpoint(tmp_path, model, optimizer)
        rows = min(max(VOCAB - 2 * mesh.tp.rank, 0), 2)
        state = optimizer.state[model.rows.weight]
        return sum(state[key][rows:].abs().sum().item() for key in ("exp_avg", "exp_avg_sq"))

    assert world4.run(run) == [0.0] * 4


def test_shards_of_other_sizes_move_where_data_parallel_ranks_cut(
    world4: World, tmp_path: Path
) -> None:
    """What both tensor ranks have whole, ZeRO cuts at other places on each (the bias after its
    first element, or after four): one of them writes it."""

    numbers = torch.arange(8.0, dtype=torch.float64)

    def run() -> None:
        mesh = Mesh(dp=2, tp=2)
        start, stop = ((0, 7), (7, 8))[mesh.tp.rank]
        module = nn.Linear(1, 8)
        module.weight = nn.Parameter(numbers[start:stop, None].clone())
        module.bias = nn.Parameter(numbers.clone())
        mark_shard(module.weight, Shard(mesh.tp, 0, start, stop, 8))
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, comm=mesh.dp, lr=1)
        save_checkpoint(tmp_path, module, optimizer)

    world4.run(run)
    plain = nn.Linear(1, 8).double()
    load_checkpoint(tmp_path, plain)
    assert torch.equal(plain.weight, numbers[:, None]) and torch.equal(plain.bias, numbers)


@on_each_rank("world4")
def test_frozen_parts_and_16_bits_come_back(tmp_path: Path) -> None:
    def start(seed: int) -> tuple[Mesh, nn.Module, Any]:
        mesh = Mesh(dp=2, tp=2)
        model = cut(fresh(seed, torch.bfloat16), mesh.tp)
        model.up.weight.requires_grad_(False)
        model.norm.weight.requires_grad_(False)
        return mesh, model, ZeroOptimizer(model.parameters(), torch.optim.AdamW, 2, mesh.dp, lr=0.1)

    mesh, model, optimizer = start(0)
    train(model, optimizer, mesh.dp, EARLY)
    save_checkpoint(tmp_path, model, optimizer)
    expected = train(model, optimizer, mesh.dp, LATE)
    mesh, model, optimizer = start(1)
    load_checkpoint(tmp_path, model, optimizer)
    assert train(model, optimizer, mesh.dp, LATE) == expected


@on_each_rank("world4")
def test_a_part_of_the_ranks_may_have_a_model_of_its_own(tmp_path: Path) -> None:
    mesh = Mesh(model=2, tp=2)
    which = mesh.model.rank
    folder = tmp_path / str(which)
    save_checkpoint(folder, cut(fresh(seed=which), mesh.tp), comm=mesh.tp)
    other = cut(fresh(seed=5), mesh.tp)
    load_checkpoint(folder, other, comm=mesh.tp)
    assert difference(whole_of(other), fresh(seed=which).state_dict()) == 0


@on_each_rank("world4")
def test_the_comm_of_the_mesh_finds_replicas_along_another_axis(tmp_path: Path) -> None:
    """As context-parallel ranks are: ZeRO shards over dp, and all four write one checkpoint."""
    mesh = Mesh(dp=2, cp=2)
    model = fresh()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, comm=mesh.dp, lr=0.1)
    train(model, optimizer, mesh.dp, EARLY)
    save_checkpoint(tmp_path, model, optimizer, comm=mesh.comm)
    other = fresh(seed=1)
    load_checkpoint(tmp_path, other, comm=mesh.comm)
    assert difference(other.state_dict(), model.state_dict()) == 0


def test_another_vocabulary_is_named(world4: World, tmp_path: Path) -> None:
    def run() -> None:
        mesh = Mesh(dp=2, tp=2)
        model = DDP(cut(fresh(), mesh.tp), mesh.dp)
        save_checkpoint(tmp_path, model)
        wider = cut(fresh(), mesh.tp)
        start, stop = ((0, 3), (3, 6))[mesh.tp.rank]
        mark_shard(wider.rows.weight, Shard(mesh.tp, 0, start, stop, 6))
        load_checkpoint(tmp_path, DDP(wider, mesh.dp))

    words = r"rows.weight is \[5, 6\] in the checkpoint and \[6, 6\] here"
    raises(words, world4.run, run, error=RankError)


def test_parts_that_do_not_make_up_the_whole_are_found(world4: World, tmp_path: Path) -> None:
    def run() -> None:
        mesh = Mesh(dp=2, tp=2)
        model = cut(fresh(), mesh.tp)
        mark_shard(model.up.weight, Shard(mesh.tp, 0, 0, 6, 12))  # on both
        save_checkpoint(tmp_path, model)

    raises("shards of all ranks do not make up the model", world4.run, run, error=RankError)
    assert not list(tmp_path.iterdir())


def test_state_of_rows_is_refused_where_rows_are_cut(world4: World, tmp_path: Path) -> None:
    make = partial(torch.optim.Adafactor, lr=1e-2)
    save_checkpoint(tmp_path / "plain", *plain_after_early(make))

    def run() -> None:
        mesh = Mesh(dp=1, tp=4)
        model, optimizer = built("plain", mesh, make)
        before, words = whole_of(model), "treats each element independently"
        raises(words, load_checkpoint, tmp_path / "plain", model, optimizer)
        assert difference(whole_of(model), before) == 0
        train(model, optimizer, mesh.dp, EARLY)
        raises(words, save_checkpoint, tmp_path / "cut", model, optimizer)
        save_checkpoint(tmp_path / "cut", model)

    world4.run(run)
    load_checkpoint(tmp_path / "cut", fresh())
