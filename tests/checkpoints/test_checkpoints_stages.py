"""Checkpoints in three dimensions: from any stages, parts and shards into any others."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint_cases import check_written, written_by
from labkit import (
    GPT,
    Comm,
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
from small_models import difference
from stage_cases import Layout, alone, built, gpt, tokens, train
from tables import raises
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
    last, its_optimizer = alone(tied, seed=3, make=OTHER)
    step = load_checkpoint(folder / str(len(layouts)), last, its_optimizer).step
    assert step == len(layouts) + 2
    steps = range(step, step + 2)
    expected = train(None, model, optimizer, steps)
    assert train(None, last, its_optimizer, steps) == pytest.approx(expected, abs=AGREE, rel=0)


ALWAYS = ("a few, tied", "a few, untied")  # the others in the slow tests
FOUR = {
    "a few, tied": [
        Layout(pp=2, dp=2, strategy="ddp"),
        Layout(pp=2, tp=2, chunks=2, scatter_gather=True),
        Layout(dp=2, tp=2, strategy="zero-1"),
    ],
    "a few, untied": [
        Layout(pp=2, dp=2, strategy="zero-1"),
        Layout(pp=2, dp=2, chunks=2, strategy="zero-3"),
        Layout(pp=2, tp=2, sequence=True),
    ],
    "tied": [
        Layout(pp=4),
        Layout(dp=2, tp=2, strategy="zero-3"),
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
        Layout(dp=4, tp=2, strategy="zero-2"),
    ],
}


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x in ALWAYS else pytest.mark.slow) for x in FOUR]
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
    save_checkpoint(folder, model, optimizer, step=2)


def is_as_one_process_writes_it(folder: Path, tied: bool) -> None:
    """Each element is there once, of tied parameters too, and so are the bytes."""
    single, its_optimizer = alone(tied)
    train(None, single, its_optimizer, range(2))
    expected = written_by(single, its_optimizer)
    metadata = check_written(folder / "step_00000002", expected)
    stored = metadata.storage_data.values()
    places = {(where.relative_path, where.offset, where.length) for where in stored}
    files = [path.stat().st_size for path in (folder / "step_00000002").glob("*.distcp")]
    assert sum(files) == sum(length for _, _, length in places), "bytes that nobody reads"
    entries = metadata.state_dict_metadata
    once = [name for name in expected if name != "model.head.weight" or not tied]
    boxes = sum(len(entries[name].chunks) for name in once)
    assert len(places) == boxes + len(entries) - len(expected), "a box is written twice"


WRITTEN = [
    (Layout(pp=2, dp=2, strategy="ddp"), True),
    (Layout(pp=2, tp=2, chunks=2), True),
    (Layout(pp=2, dp=2, strategy="zero-3"), False),
    (Layout(pp=2, dp=2, chunks=2, strategy="zero-1"), False),
    (Layout(pp=2, dp=2, strategy="zero-2"), True),
]


@pytest.mark.parametrize(
    ("layout", "tied"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (i > 1)) for i, one in enumerate(WRITTEN)],
    ids=str,
)
def test_names_shapes_and_elements_are_those_of_the_plain_model(
    world4: World, layout: Layout, tied: bool, tmp_path: Path
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

    pipe = piped(0, 0.1)
    for _ in range(2):
        pipe.step(x, y)
    save_checkpoint(tmp_path, pipe, pipe.optimizer)
    expected = [pipe.step(x, y) for _ in range(2)], pipe.full_state_dict()
    other = piped(1, 0.3)
    other.step(x, y)
    load_checkpoint(tmp_path, other, other.optimizer)
    found = [other.step(x, y) for _ in range(2)], other.full_state_dict()
    assert expected[0] == found[0] and difference(found[1], expected[1]) == 0


@on_each_rank("world4")
def test_a_model_in_bf16_goes_on_from_fp32_masters(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Mesh, Pipeline, ZeroOptimizer]:
        mesh = Mesh(pp=2, dp=2)
        stages = split(gpt(seed, tied=False).bfloat16(), 2)
        pipe = Pipeline(stages, mesh.pp, "1f1b", 1, tokens_loss)
        params = pipe.parameters()
        return mesh, pipe, ZeroOptimizer(params, torch.optim.AdamW, 2, mesh.dp, lr=0.1)

    mesh, pipe, optimizer = made(0)
    train(mesh, pipe, optimizer, range(2))
    save_checkpoint(tmp_path, pipe, optimizer)
    expected = train(mesh, pipe, optimizer, range(2, 4))
    mesh, pipe, optimizer = made(1)
    load_checkpoint(tmp_path, pipe, optimizer)
    assert train(mesh, pipe, optimizer, range(2, 4)) == expected


class HeadFirst(GPT):
    """What is tied has other names first in the model than in the order of its layers."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(11, 8, 4, 2, 6)
        head = self._modules.pop("head")
        self._modules = {"head": head, **self._modules}
        self.double()


def test_tied_parameters_are_found_by_any_name(world4: World, tmp_path: Path) -> None:
    model = HeadFirst(0)
    assert next(iter(dict(model.named_parameters()))) == "head.weight"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(None, model, optimizer, range(2))
    save_checkpoint(tmp_path / "one", model, optimizer)

    def run() -> None:
        mesh = Mesh(pp=4)
        pipe = Pipeline(split(HeadFirst(1), 4), mesh.pp, "1f1b", 2, tokens_loss)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        load_checkpoint(tmp_path / "one", pipe, optimizer)
        for step in range(2, 4):
            optimizer.zero_grad()
            pipe.step(tokens(step), tokens(step))
            optimizer.step()
        save_checkpoint(tmp_path / "four", pipe, optimizer)

    world4.run(run)
    train(None, model, optimizer, range(2, 4))
    other = HeadFirst(2)
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    load_checkpoint(tmp_path / "four", other, its_optimizer)
    expected = train(None, model, optimizer, range(4, 6))
    assert train(None, other, its_optimizer, range(4, 6)) == pytest.approx(expected, abs=AGREE)


def deeper(folder: str) -> None:
    mesh = Mesh(pp=4)
    torch.manual_seed(0)
    model = GPT(11, 8, 5, 2, 6, tied=False).double()
    load_checkpoint(folder, Pipeline(split(model, 4), mesh.pp, loss_fn=tokens_loss))


def wider(folder: str) -> None:
    model = GPT(11, 12, 4, 2, 6, tied=False).double()
    load_checkpoint(folder, Pipeline(split(model, 4), None, loss_fn=tokens_loss))


def tied_here(folder: str) -> None:
    _, model, optimizer = built(Layout(pp=2, tp=2), tied=True)
    load_checkpoint(folder, model, optimizer)


def cut_off(folder: str) -> None:
    files = sorted(Path(folder).glob("step_*/*.distcp"))
    if Comm().rank == 0:
        with files[-1].open("r+b") as file:
            file.truncate(files[-1].stat().st_size // 2)
    Comm().barrier()
    _, model, optimizer = built(Layout(pp=2, tp=2), tied=False)
    load_checkpoint(folder, model, optimizer)


def along_dp(folder: str) -> None:
    mesh, model, optimizer = built(Layout(pp=2, dp=2, strategy="ddp"))
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


REFUSED: list[tuple[Callable[[str], None], str]] = [
    (deeper, "it lacks blocks.4.norm1.weight, blocks.4.norm1.bias, blocks.4.attn.q.weight and"),
    (wider, "of other shape: embed.tokens.weight is [11, 8] there and [11, 12] here"),
    (tied_here, "this optimizer has no head.weight"),
    (cut_off, "are missing or not those that were saved; load another checkpoint beside it"),
    (along_dp, "would save a part of the model; give comm=mesh.comm"),
    (two_owners, "ZeroOptimizer and ZeRO3 both say what a rank owns"),
    (another_group_on_one_stage, "the number of parameter groups is 1, 2, 3, 4"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "expected"), REFUSED, ids=[run.__name__ for run, _ in REFUSED])
def test_it_is_refused(
    world4: World, run: Callable[[str], None], expected: str, tmp_path: Path
) -> None:
    world4.run(saved, Layout(pp=4), False, str(tmp_path))
    before = sorted(path.name for path in tmp_path.iterdir())
    raises((expected,), world4.run, run, str(tmp_path), error=RankError)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def the_last_copy_is_written(self: Any) -> set[str]:
    every = {name for name, _ in self.named}
    return every - {"embed.tokens.weight"} if self.pipeline.comm.rank == 0 else every


def a_stage_is_forgotten(self: Any, real: Any = Contents.to_write) -> Any:
    return iter(()) if self.pipeline.comm.rank == 1 else real(self)


def a_stages_state_is_forgotten(self: Any, real: Any = Contents.owned) -> Any:
    last = self.pipeline.comm.rank == 1
    return [replace(piece, optimizer=None) if last else piece for piece in real(self)]


FAULTS = {
    "every copy under its own name": (Contents, "first_name", lambda self, name: name),
    "the last copy is written": (Contents, "written_here", the_last_copy_is_written),
    "a stage is forgotten": (Contents, "to_write", a_stage_is_forgotten),
    "a stage's state is forgotten": (Contents, "owned", a_stages_state_is_forgotten),
}


def writes_as_one_process(world: World, folder: Path, fault: str | None) -> None:
    def run() -> None:
        with patch.object(*FAULTS[fault]) if fault else nullcontext():
            mesh, model, optimizer = built(Layout(pp=2, dp=2, strategy="ddp"))
            train(mesh, model, optimizer, range(2))
            if model.comm.rank == 1:  # the second copy of what is tied: not to be in the file
                with torch.no_grad():
                    model.module.get_parameter("head.weight").add_(1.0)
            save_checkpoint(folder, model, optimizer, step=2)

    world.run(run)
    is_as_one_process_writes_it(folder, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_the_check_red(world4: World, fault: str, tmp_path: Path) -> None:
    writes_as_one_process(world4, tmp_path / "right", None)
    with pytest.raises((AssertionError, RankError)):
        writes_as_one_process(world4, tmp_path / "wrong", fault)
