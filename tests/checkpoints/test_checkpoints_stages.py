"""Checkpoints in three dimensions: from any stages, parts and shards into any others."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint_cases import check_written, written_by
from harness import Replacement, instead, on_ranks, replaces
from labkit import (
    GPT,
    Mesh,
    Pipeline,
    RankError,
    World,
    ZeroOptimizer,
    full_state_dict,
    load_checkpoint,
    save_checkpoint,
    split,
)
from labkit.checkpoints.contents import Contents
from pipeline_cases import batch, layers, tokens_loss
from shard_cases import ADAM
from small_models import difference
from stage_cases import Layout, alone, built, gpt, train
from tables import cases, raises
from worlds import on_each_rank

AGREE = 1e-10
OTHER = partial(torch.optim.AdamW, lr=3e-3)


def hop(layout: Layout, tied: bool, step: int, here: str, there: str) -> tuple[Any, Any]:
    """Load into another model and state, train one step, save: the loss, and the whole state."""
    mesh, model, optimizer = built(layout, tied, seed=1, make=OTHER)
    train(mesh, model, optimizer, range(77, 78))
    assert load_checkpoint(here, model, optimizer).step == step
    losses = train(mesh, model, optimizer, range(step, step + 1))
    save_checkpoint(there, model, optimizer, step=step + 1)
    return losses, full_state_dict(model)


def goes_round(world: World, layouts: list[Layout], tied: bool, folder: Path) -> None:
    """One process, each layout in turn, one process again: as one process that never stops."""
    model, optimizer = alone(tied)
    train(None, model, optimizer, range(2))
    save_checkpoint(folder / "0", model, optimizer, step=2)
    for turn, layout in enumerate(layouts):
        step = turn + 2
        expected = train(None, model, optimizer, range(step, step + 1))
        weights = full_state_dict(model)
        here, there = str(folder / str(turn)), str(folder / str(turn + 1))
        results = world.run(hop, layout, tied, step, here, there)
        losses = [loss for found, _ in results for loss in found]
        assert losses == pytest.approx(expected * len(losses), abs=AGREE, rel=0), str(layout)
        assert len(losses) == layout.dp * layout.tp, str(layout)
        for _, state in results:
            assert (off := difference(state, weights)) <= AGREE, f"{layout}: off by {off}"
    step = len(layouts) + 2
    last, last_optimizer = alone(tied, seed=3, make=OTHER)
    assert load_checkpoint(folder / str(len(layouts)), last, last_optimizer).step == step
    expected = train(None, model, optimizer, range(step, step + 2))
    losses = train(None, last, last_optimizer, range(step, step + 2))
    assert losses == pytest.approx(expected, abs=AGREE, rel=0)


FOUR = {  # in the slow tests, but a few
    "a few, tied": [
        Layout(pp=2, dp=2, strategy="ddp"),
        Layout(pp=2, tp=2, chunks=2, scatter_gather=True),
        Layout(dp=2, tp=2, strategy="zero-1", sequence=True),
    ],
    "a few, untied": [
        Layout(pp=2, dp=2, strategy="zero-1"),
        Layout(pp=2, dp=2, chunks=2, strategy="zero-3"),
        Layout(pp=2, tp=2, sequence=True),
    ],
    "tied": [
        Layout(pp=4),
        Layout(dp=2, tp=2, strategy="zero-3", sequence=True),
        Layout(pp=2, dp=2, chunks=2, strategy="ddp"),
        Layout(dp=4, strategy="zero-2"),
        Layout(pp=2, dp=2, strategy="masters"),
        Layout(pp=2, tp=2, chunks=2, sequence=True),
    ],
    "tied and sharded": [
        Layout(pp=2, dp=2, strategy="zero-1"),
        Layout(dp=4, strategy="ddp"),
        Layout(pp=2, dp=2, strategy="zero-2"),
        Layout(dp=4, strategy="ddp"),
        Layout(pp=2, dp=2, chunks=2, strategy="zero-1"),
    ],
    "untied": [
        Layout(pp=2, dp=2, strategy="zero-3"),
        Layout(pp=2, dp=2, chunks=2, strategy="zero-1"),
        Layout(dp=2, tp=2, strategy="ddp"),
        Layout(pp=2, dp=2, strategy="zero-2"),
        Layout(pp=2, tp=2, scatter_gather=True),
        Layout(dp=4, strategy="zero-3"),
    ],
}
EIGHT = {
    "tied": [
        Layout(pp=2, dp=2, tp=2, strategy="ddp"),
        Layout(pp=2, dp=2, tp=2, chunks=2, strategy="ddp", sequence=True),
    ],
    "untied": [
        Layout(pp=2, dp=2, tp=2, strategy="zero-3"),
        Layout(pp=2, dp=2, tp=2, chunks=2, strategy="zero-1", scatter_gather=True),
        Layout(dp=4, tp=2, strategy="zero-2", sequence=True),
    ],
}


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.slow] * ("a few" not in x)) for x in FOUR]
)
def test_layouts_go_on_from_each_other(world4: World, kind: str, tmp_path: Path) -> None:
    goes_round(world4, FOUR[kind], "untied" not in kind, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_eight_ranks_in_three_dimensions(tmp_path: Path) -> None:
    with World(8, timeout_s=120) as eight:
        for kind, layouts in EIGHT.items():
            goes_round(eight, layouts, kind == "tied", tmp_path / kind)


def saved(layout: Layout, tied: bool, folder: str) -> None:
    mesh, model, optimizer = built(layout, tied)
    train(mesh, model, optimizer, range(2))
    if tied and mesh.pp.rank == 1:  # the second copy of what is tied: not to be in the file
        with torch.no_grad():
            model.module.get_parameter("head.weight").add_(1.0)
    save_checkpoint(folder, model, optimizer, step=2)


def is_as_one_process_writes_it(folder: Path, tied: bool) -> None:
    """Each element is there once, of tied parameters too, and so are the bytes."""
    model, optimizer = alone(tied)
    train(None, model, optimizer, range(2))
    expected = written_by(model, optimizer)
    metadata = check_written(folder / "step_00000002", expected)
    stored = metadata.storage_data.values()
    places = {(where.relative_path, where.offset, where.length) for where in stored}
    files = [path.stat().st_size for path in (folder / "step_00000002").glob("*.distcp")]
    assert sum(files) == sum(length for _, _, length in places), "bytes that nobody reads"
    entries = metadata.state_dict_metadata
    once = [name for name in expected if name != "model.head.weight" or not tied]
    boxes = sum(len(entries[name].chunks) for name in once)
    assert len(places) == boxes + len(entries) - len(expected), "a box is written twice"


TWO_BY_TWO = Layout(pp=2, dp=2, strategy="ddp")


@cases(
    (TWO_BY_TWO, True),
    (Layout(pp=2, tp=2, chunks=2), True),
    pytest.param(Layout(pp=2, dp=2, strategy="zero-3"), False, marks=pytest.mark.slow),
    pytest.param(Layout(pp=2, dp=2, chunks=2, strategy="zero-1"), False, marks=pytest.mark.slow),
    pytest.param(Layout(pp=2, dp=2, strategy="zero-2"), True, marks=pytest.mark.slow),
    ids=str,
)
def test_names_shapes_and_elements_are_those_of_the_plain_model(
    layout: Layout, tied: bool, world4: World, tmp_path: Path
) -> None:
    world4.run(saved, layout, tied, str(tmp_path))
    is_as_one_process_writes_it(tmp_path, tied)


class Counting(nn.Module):
    """A layer with three buffers: its own, one that it shares with others, one that is not kept."""

    def __init__(self, shared: Tensor, cache: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("shared", shared)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.linear(x)


def counting(seed: int, value: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(seed)
    shared, cache = torch.full((3,), value), torch.zeros(1)
    return [Counting(shared, cache) for _ in range(4)]


def test_buffers_frozen_parameters_and_a_users_own_stages(world4: World, tmp_path: Path) -> None:
    """Names are those of nn.Sequential(*stages); DDP's and ZeRO's replicas have the same."""
    x = torch.ones(4, 3).double()

    def run() -> bool:
        mesh = Mesh(pp=2, dp=2)
        stages = counting(0, 7.0)
        stages[1].linear.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
        stages[3].requires_grad_(False)  # of which its rank has another, trained stage
        pipe = Pipeline(stages, mesh.pp, "interleaved", 2, F.mse_loss)
        optimizer = ZeroOptimizer(pipe.parameters(), torch.optim.SGD, comm=mesh.dp, lr=0.1)
        pipe.step(x, 2 * x)
        optimizer.step()
        save_checkpoint(tmp_path, pipe, optimizer)
        state, wanted = nn.Sequential(*counting(5)), pipe.full_state_dict()
        load_checkpoint(tmp_path, state, comm=mesh.comm)
        assert state[0].shared is state[3].shared
        return all(torch.equal(one, wanted[name]) for name, one in state.state_dict().items())

    assert world4.run(run) == [True] * 4
    alone = nn.Sequential(*counting(5))
    load_checkpoint(tmp_path, alone)
    assert [one.seen.tolist() for one in alone] == [[2, 2]] * 4  # two micro-batches
    assert alone[2].shared.tolist() == [7] * 3
    reader = dcp.FileSystemReader(tmp_path / "step_00000000")
    assert "model.0.cache" not in reader.read_metadata().state_dict_metadata


@on_each_rank("world4")
def test_pipedream_goes_on_with_its_own_optimizer(tmp_path: Path) -> None:
    x, y = batch()

    def piped(seed: int, lr: float) -> Pipeline:
        return Pipeline(
            layers(4, seed=seed), None, "pipedream", 3, F.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        )  # fmt: skip

    pipe, other = piped(0, 0.1), piped(1, 0.3)
    for _ in range(2):
        pipe.step(x, y)
    save_checkpoint(tmp_path, pipe, pipe.optimizer)
    other.step(x, y)
    load_checkpoint(tmp_path, other, other.optimizer)
    assert [pipe.step(x, y) for _ in range(2)] == [other.step(x, y) for _ in range(2)]
    assert difference(other.full_state_dict(), pipe.full_state_dict()) == 0


@on_each_rank("world4")
def test_a_model_in_bf16_goes_on_from_fp32_masters(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Mesh, Pipeline, ZeroOptimizer]:
        mesh, stages = Mesh(pp=2, dp=2), split(gpt(seed, tied=False).bfloat16(), 2)
        pipe = Pipeline(stages, mesh.pp, "1f1b", 1, tokens_loss)
        adamw = ZeroOptimizer(pipe.parameters(), torch.optim.AdamW, 2, mesh.dp, lr=0.1)
        return mesh, pipe, adamw

    mesh, pipe, optimizer = made(0)
    train(mesh, pipe, optimizer, range(2))
    save_checkpoint(tmp_path, pipe, optimizer)
    expected = train(mesh, pipe, optimizer, range(2, 4))
    mesh, pipe, optimizer = made(1)
    load_checkpoint(tmp_path, pipe, optimizer)
    assert train(mesh, pipe, optimizer, range(2, 4)) == expected


def head_first(seed: int) -> GPT:
    """What is tied has other names first in the model than in the order of its layers."""
    model = gpt(seed)
    model._modules = {"head": model._modules.pop("head"), **model._modules}
    return model


def test_tied_parameters_are_found_by_any_name(world4: World, tmp_path: Path) -> None:
    model = head_first(0)
    assert next(iter(dict(model.named_parameters()))) == "head.weight"
    optimizer = ADAM(model.parameters())
    train(None, model, optimizer, range(2))
    save_checkpoint(tmp_path / "one", model, optimizer)

    def run() -> None:
        pipe = Pipeline(split(head_first(1), 4), Mesh(pp=4).pp, "1f1b", 2, tokens_loss)
        optimizer = ADAM(pipe.parameters())
        load_checkpoint(tmp_path / "one", pipe, optimizer)
        train(None, pipe, optimizer, range(2, 4))
        save_checkpoint(tmp_path / "four", pipe, optimizer)

    world4.run(run)
    train(None, model, optimizer, range(2, 4))
    other = head_first(2)
    other_optimizer = ADAM(other.parameters())
    load_checkpoint(tmp_path / "four", other, other_optimizer)
    expected = train(None, model, optimizer, range(4, 6))
    assert train(None, other, other_optimizer, range(4, 6)) == pytest.approx(expected, abs=AGREE)


def load_into(folder: str, *sizes: int) -> None:
    model = GPT(*sizes, tied=False).double()
    load_checkpoint(folder, Pipeline(split(model, 4), None, loss_fn=tokens_loss))


def deeper(folder: str) -> None:
    load_into(folder, 11, 8, 5, 2, 6)


def wider(folder: str) -> None:
    load_into(folder, 11, 12, 4, 2, 6)


def tied_here(folder: str) -> None:
    _, model, optimizer = built(Layout(pp=2, tp=2), tied=True)
    load_checkpoint(folder, model, optimizer)


def along_dp(folder: str) -> None:
    mesh, model, optimizer = built(TWO_BY_TWO)
    save_checkpoint(f"{folder}/other", model, optimizer, comm=mesh.dp)


def two_owners(folder: str) -> None:
    mesh, model, _ = built(Layout(pp=2, dp=2, strategy="zero-3"), tied=False)
    whole = nn.Linear(2, 2)
    optimizer = ZeroOptimizer(whole.parameters(), torch.optim.SGD, comm=mesh.dp, lr=1)
    save_checkpoint(f"{folder}/other", model, optimizer)


def another_group_on_one_stage(folder: str) -> None:
    mesh, model, _ = built(Layout(pp=4), tied=False)
    groups: list[Any] = [{"params": [p]} for p in model.parameters()][: 1 + mesh.pp.rank]
    save_checkpoint(f"{folder}/other", model, torch.optim.SGD(groups, lr=1))


@pytest.mark.slow
@cases(
    (deeper, "it lacks blocks.4.norm1.weight, blocks.4.norm1.bias, blocks.4.attn.q.weight and"),
    (
        wider,
        "of different shape: embed.tokens.weight is [11, 8] in the checkpoint and [11, 12] here",
    ),
    (tied_here, "this optimizer has no head.weight"),
    (along_dp, "would save only a part of the model; pass comm=mesh.comm"),
    (two_owners, "ZeroOptimizer and ZeRO3 both shard the optimizer"),
    (another_group_on_one_stage, "with 1, 2, 3, 4 parameter groups"),
)
def test_another_model_and_a_part_of_one_are_refused(
    run: Callable[[str], None], words: str, world4: World, tmp_path: Path
) -> None:
    world4.run(saved, Layout(pp=4), False, str(tmp_path))
    before = sorted(path.name for path in tmp_path.iterdir())
    raises((words,), world4.run, run, str(tmp_path), error=RankError)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@replaces(Contents, "written_here")
def the_last_copy_is_written(real: Any, self: Any) -> set[str]:
    every = {name for name, _ in self.named}
    return every - {"embed.tokens.weight"} if self.pipeline.comm.rank == 0 else every


@replaces(Contents, "to_write")
def a_stage_is_forgotten(real: Any, self: Any) -> Any:
    return iter(()) if self.pipeline.comm.rank == 1 else real(self)


@replaces(Contents, "owned")
def the_state_of_a_stage_is_forgotten(real: Any, self: Any) -> Any:
    last = self.pipeline.comm.rank == 1
    return [replace(piece, optimizer=None) if last else piece for piece in real(self)]


FAULTS = [
    instead("every_copy_under_its_own_name", Contents, "first_name", lambda self, name: name),
    the_last_copy_is_written, a_stage_is_forgotten, the_state_of_a_stage_is_forgotten,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_turns_the_check_red(world4: World, fault: Replacement, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, RankError)):
        on_ranks(world4, fault, saved, TWO_BY_TWO, True, str(tmp_path))
        is_as_one_process_writes_it(tmp_path, tied=True)
