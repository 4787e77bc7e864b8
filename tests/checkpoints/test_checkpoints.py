"""Checkpoints: from any strategy and size into any other, in torch's own format."""

import os
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from checkpoint_cases import (
    STRATEGIES,
    fresh,
    groups_of,
    load_and_go_on,
    same,
    save_and_go_on,
    train,
)
from labkit import Comm, Single, World, load_checkpoint, save_checkpoint
from labkit.checkpoints import saving
from labkit.checkpoints.boxes import boxes_of, small_boxes, view_of
from labkit.runtime import progress
from small_models import take_steps
from tables import cases
from worlds import on_each_rank, world_fixture

AGREE = 1e-10
WITH_MASTERS = ["zero-1", "zero-2", "masters"]
SHAPES = [(), (5,), (1, 1), (4, 4), (1, 4), (4, 1), (3, 4, 5), (2, 3, 1, 4)]


world = world_fixture(3)


def ranges(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, end - start) for start in range(numel) for end in range(start + 1, numel + 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_cover_a_range_once_in_order_and_small_ones_have_few_elements_or_one_row(
    shape: tuple[int, ...],
) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, numel in ranges(numbers.numel()):
        expected = list(range(start, start + numel))
        boxes = list(boxes_of(shape, start, numel))
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        pieces = [view_of(numbers, numbers.shape, 0, box).flatten() for box in boxes]
        assert torch.cat(pieces).tolist() == expected
        flat = numbers.view(-1)[start : start + numel]
        pieces = [view_of(flat, numbers.shape, start, box) for box in boxes]
        assert [piece.shape for piece in pieces] == [torch.Size(box.sizes) for box in boxes]
        assert torch.cat([piece.flatten() for piece in pieces]).tolist() == expected
        small = list(small_boxes(shape, start, numel, 6))
        assert all(box.numel <= max(6, torch.Size(shape[1:]).numel()) for box in small)
        pieces = [view_of(numbers, numbers.shape, 0, box).flatten() for box in small]
        assert torch.cat(pieces).tolist() == expected


def test_a_tensor_without_elements_is_one_box() -> None:
    assert [box.sizes for box in small_boxes((3, 0), 0, 0, 8)] == [(3, 0)]
    assert list(boxes_of((3, 4), 2, 0)) == []


@cases(*product(STRATEGIES, [torch.float64]), *product(WITH_MASTERS, [torch.bfloat16]), ids=str)
def test_going_on_is_bit_for_bit_as_if_never_stopped(
    strategy: str, dtype: torch.dtype, world: World, tmp_path: Path
) -> None:
    """A model in bf16 goes on from its fp32 masters, which are stored."""
    expected = world.run(save_and_go_on, strategy, 3, str(tmp_path), dtype)
    stored = dcp.FileSystemReader(tmp_path / "step_00000003").read_metadata().state_dict_metadata
    for name in ("model.deep", "optimizer.state.deep.exp_avg"):
        assert stored[name].properties.dtype == torch.promote_types(dtype, torch.float32)
    assert world.run(load_and_go_on, strategy, 3, str(tmp_path), dtype) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), list(product(STRATEGIES, (1, 2, 4))))
def test_any_strategy_and_size_loads_what_any_other_saved(
    world4: World, strategy: str, ranks: int, tmp_path: Path
) -> None:
    """Every strategy loads what every other saved, on one, two, three and four ranks in turn."""
    expected = world4.run(save_and_go_on, strategy, ranks, str(tmp_path))[0]
    for turn, other in enumerate(STRATEGIES, ranks):
        size = turn % 4 + 1
        found = world4.run(load_and_go_on, other, size, str(tmp_path))
        for losses in found[:size]:
            assert losses == pytest.approx(expected, abs=AGREE, rel=0), (other, size)


@on_each_rank("world")
def test_weights_alone_and_other_dtypes(tmp_path: Path) -> None:
    comm = Comm()
    model, optimizer = STRATEGIES["zero-1"](fresh(dtype=torch.float32), comm, 1e-2)
    train(model, optimizer, comm, range(2))
    save_checkpoint(tmp_path, model, optimizer)
    for dtype in (torch.float64, torch.bfloat16):
        other = fresh(seed=1, dtype=dtype)
        assert load_checkpoint(tmp_path, other).step == 0
        for name, x in other.state_dict().items():
            assert x.dtype == dtype
            assert torch.equal(x, model.state_dict()[name].to(dtype)), name


def small(seed: int, steps: int = 1, strategy: str | None = None) -> tuple[nn.Module, Any]:
    """After some steps: every parameter is used, two of them are tied."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Linear(4, 3, bias=False)
    )
    model[3].weight = model[0].weight
    if strategy:
        optimizer = STRATEGIES[strategy](model, Comm(), 0.1)[1]
    else:
        optimizer = torch.optim.AdamW(groups_of(model, 0.2 + seed))
    take_steps(optimizer, lambda _: model(torch.randn(5, 4)).sum(), steps)
    return model, optimizer


def test_torchs_own_load_reads_it(world: World, tmp_path: Path) -> None:
    def save() -> dict[str, Any]:
        model, optimizer = small(0, 2, "zero-1")
        save_checkpoint(tmp_path, model, optimizer, step=7)
        return {name: x.tolist() for name, x in model.state_dict().items()}

    expected = world.run(save)[0]
    state = dict(zip(("model", "optimizer"), get_state_dict(*small(1))))
    dcp.load(state, checkpoint_id=tmp_path / "step_00000007", no_dist=True)
    assert {name: x.tolist() for name, x in state["model"].items()} == expected
    groups = state["optimizer"]["param_groups"]
    assert [group["params"][0] for group in groups] == ["0.weight", "0.bias"]
    assert state["optimizer"]["state"]["0.weight"]["step"].item() == 2
    assert [group["lr"] for group in groups] == [0.1, 0.05]


def test_what_torchs_own_save_wrote_is_read(tmp_path: Path) -> None:
    expected = dict(zip(("model", "optimizer"), get_state_dict(*small(0))))
    dcp.save(expected, checkpoint_id=tmp_path, no_dist=True)

    other, optimizer = small(1)
    with pytest.warns(UserWarning, match="has no checksums"):
        loaded = load_checkpoint(tmp_path, Single(other), optimizer)
    assert (loaded.path, loaded.step) == (tmp_path, None)
    assert same(list(get_state_dict(other, optimizer)), [*expected.values()])


def test_replicas_are_written_once_and_by_all_ranks_alike(world: World, tmp_path: Path) -> None:
    def save() -> int:
        model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(9)))
        save_checkpoint(tmp_path, STRATEGIES["ddp"](model, Comm(), 0.1)[0])
        return sum(p.nbytes for p in model.parameters())

    nbytes = world.run(save)[0]
    sizes = [path.stat().st_size for path in tmp_path.glob("step_*/*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < 1.2 * nbytes / 3
    assert nbytes < sum(sizes) < 1.2 * nbytes


@on_each_rank("world")
def test_one_box_at_a_time_is_in_memory(tmp_path: Path) -> None:
    live: list[Any] = []
    written: list[int] = []
    read: list[int] = []

    def noting(sizes: list[int], make: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **how: Any) -> Any:
            made = make(*args, **how)
            if isinstance(made, torch.Tensor):
                assert not any(one() is not None for one in live), "the one before is still there"
                live.append(weakref.ref(made))
                sizes.append(made.untyped_storage().nbytes())
            return made

        return noted

    model = nn.Sequential(*(nn.Linear(50, 100) for _ in range(3)))
    wrapped, optimizer = STRATEGIES["zero-1"](model, Comm(), 0.1)
    copies = noting(written, saving._compact_copy)
    with patch.multiple(saving, BOX_BYTES=2000, _compact_copy=copies):
        save_checkpoint(tmp_path, wrapped, optimizer)
        with patch.object(torch, "load", noting(read, torch.load)):
            load_checkpoint(tmp_path, wrapped, optimizer)
    assert len(written) > 10 and max(written) <= 2000
    assert len(read) > 10 and max(read) <= 2000


def test_folders_are_named_by_step_and_old_ones_are_removed(world: World, tmp_path: Path) -> None:
    def save(step: int, keep: int) -> str:
        return save_checkpoint(tmp_path, nn.Linear(2, 2), step=step, keep=keep).name

    for step, keep, name, kept in (
        (1, 2, "step_00000001", []),
        (2, 2, "step_00000002", ["step_00000001"]),
        (3, 2, "step_00000003", ["step_00000002"]),
        (3, 2, "step_00000003.2", ["step_00000002"]),
        (1, 2, "step_00000001", ["step_00000003.2"]),  # gone back, and trained from there
        (9, 1, "step_00000009", []),
    ):
        assert world.run(save, step, keep) == [name] * 3
        assert sorted(os.listdir(tmp_path)) == sorted(["latest", name, *kept])


def test_a_bar_is_shown_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []

    def bar(things: range, label: str) -> Iterator[int]:
        for thing in things:
            yield thing
            shown.append(thing)

    monkeypatch.setattr(progress, "progress", bar)
    for patience_s, expected in ((progress.PATIENCE_S, []), (-1.0, [0, 1, 2])):
        monkeypatch.setattr(progress, "PATIENCE_S", patience_s)
        assert list(progress.slow_progress(range(3), "saving")) == [0, 1, 2]
        assert shown == expected
    shown.clear()
    items = progress.slow_progress(range(5), "saving")
    monkeypatch.setattr(progress, "PATIENCE_S", 600.0)
    assert [next(items), next(items)] == [0, 1]
    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    assert list(items) == [2, 3, 4] == shown


def test_a_bar_ends_its_line_when_the_loop_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    for thing in progress._printed(range(9), "saving", 9):
        if thing == 3:
            break
    assert capsys.readouterr().out.endswith("s left\n")
