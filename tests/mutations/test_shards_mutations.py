"""Faults with parts of parameters must turn tests red: a test that cannot fail proves nothing."""

import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from labkit import Comm, GradScaler, Mesh, RankError, World, load_checkpoint, save_checkpoint
from labkit.checkpoints import contents, loading, saving, stored
from labkit.checkpoints.boxes import Box, in_whole
from labkit.parallel.common import clipping
from labkit.parallel.zero import zero
from labkit.parallel.zero3 import flat as zero3_flat
from labkit.precision import scaler as scaling
from shard_cases import alone, built, loss_of, train
from test_checkpoints_tensor import AGREE, EARLY, LATE, expected_losses
from test_clipping_shards import DP_TP, SGD, clipped_step, spoiled

pytestmark = pytest.mark.slow
Fault = Callable[[], AbstractContextManager[None]]


@contextmanager
def instead(place: Any, name: str, new: Any) -> Iterator[None]:
    """In this block `place.name` is another."""
    before = getattr(place, name)
    setattr(place, name, new)
    try:
        yield
    finally:
        setattr(place, name, before)


# ---- clipping


def replicated_counted_twice() -> AbstractContextManager[None]:
    """What all tensor ranks have is summed over them, as shards are."""
    return instead(clipping, "_is_cut_over", lambda group, x: group is not None)


def shards_not_summed() -> AbstractContextManager[None]:
    """Each tensor rank takes its shards for everything."""
    return instead(clipping, "_is_cut_over", lambda group, x: group is None)


def pieces_lose_their_mark() -> AbstractContextManager[None]:
    return instead(zero, "marked_as", lambda parameter, x: x)


def parameters_of_zero_3_lose_their_mark() -> AbstractContextManager[None]:
    return instead(zero3_flat, "marked_as", lambda parameter, x: x)


def clips(world: World, fault: Fault, strategy: str) -> None:
    def run() -> tuple[float, float]:
        with fault():
            return clipped_step(strategy, DP_TP, 2.0, 0.01)

    for far in world.run(run):
        assert max(far) < AGREE


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        (replicated_counted_twice, "ddp"),
        (replicated_counted_twice, "zero-2"),
        (replicated_counted_twice, "zero-3"),
        (shards_not_summed, "ddp"),
        (shards_not_summed, "zero-1"),
        (shards_not_summed, "zero-3"),
        (pieces_lose_their_mark, "zero-1"),
        (parameters_of_zero_3_lose_their_mark, "zero-3"),
    ],
)
def test_a_wrong_norm_is_found(world4: World, fault: Fault, strategy: str) -> None:
    with pytest.raises((AssertionError, RankError)):
        clips(world4, fault, strategy)


def test_a_scaler_that_asks_the_replicas_alone_lets_ranks_part(world4: World) -> None:
    """The very fault that `check_owner` refuses."""

    def run() -> int:
        mesh = Mesh(**DP_TP)
        model, optimizer = built("zero-1", mesh, SGD)
        with instead(scaling, "check_owner", lambda *_: None):
            scaler = GradScaler(comm=mesh.dp)
            scaler.scale(loss_of(model, 0, mesh.dp)).backward()
            if Comm().rank == 3:
                spoiled(model, optimizer)
            scaler.step(optimizer)
            scaler.update()
        return scaler.skipped

    assert world4.run(run) == [0, 1, 0, 1]


# ---- checkpoints


def keeps_padding(box: Box, shard: Any) -> Box | None:
    if shard is None:
        return box
    offsets = [at + shard.start * (d == shard.dim) for d, at in enumerate(box.offsets)]
    return Box(tuple(offsets), box.sizes)


def forgets_start(box: Box, shard: Any) -> Box | None:
    """As if every part were the first."""
    found = in_whole(box, shard)
    return found and Box(box.offsets, found.sizes)


def padding_written() -> AbstractContextManager[None]:
    return instead(saving, "in_whole", keeps_padding)


def start_forgotten_in_saving() -> AbstractContextManager[None]:
    return instead(saving, "in_whole", forgets_start)


def start_forgotten_in_loading() -> AbstractContextManager[None]:
    return instead(stored, "in_whole", forgets_start)


def state_taken_for_one_number() -> AbstractContextManager[None]:
    """A moment of the whole shape is not seen to lie like its part."""

    def like_here(key: str, shape: Any, parameter: Any) -> bool:
        return shape == parameter and key == "exp_avg"

    return instead(loading, "lies_like", like_here)


def shape_of_the_part() -> AbstractContextManager[None]:
    """A parameter that is cut is written as if its part were all."""
    return instead(contents, "shard_of", lambda parameter: None)


def goes_on(world: World, fault: Fault | None, strategy: str, folder: pathlib.Path) -> None:
    def run() -> list[float]:
        mesh = Mesh(**DP_TP)
        model, optimizer = built(strategy, mesh)
        train(model, optimizer, mesh.dp, EARLY)
        save_checkpoint(folder, model, optimizer)
        model, optimizer = built(strategy, mesh, seed=1)
        load_checkpoint(folder, model, optimizer)
        return train(model, optimizer, mesh.dp, LATE)

    def faulty() -> list[float]:
        if fault is None:
            return run()
        with fault():
            return run()

    expected = expected_losses()
    for losses in world.run(faulty):
        assert losses == pytest.approx(expected, abs=AGREE, rel=0)
    model, optimizer = alone(seed=2)
    load_checkpoint(folder, model, optimizer)
    assert train(model, optimizer, None, LATE) == pytest.approx(expected, abs=AGREE, rel=0)


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-3"])
@pytest.mark.parametrize(
    "fault",
    [padding_written, start_forgotten_in_saving, start_forgotten_in_loading,
     state_taken_for_one_number, shape_of_the_part],
)  # fmt: skip
def test_a_faulty_checkpoint_is_found(
    world4: World, tmp_path: pathlib.Path, fault: Fault, strategy: str
) -> None:
    with pytest.raises((AssertionError, RankError, ValueError)):
        goes_on(world4, fault, strategy, tmp_path)


def test_the_checks_are_green_on_the_real_ones(world4: World, tmp_path: pathlib.Path) -> None:
    for strategy in ("ddp", "zero-1", "zero-3"):
        goes_on(world4, None, strategy, tmp_path / strategy)
        clips(world4, lambda: instead(zero, "IN_FLIGHT", 2), strategy)


def test_what_all_tensor_ranks_write_is_found_where_they_cut_it_differently(
    world4: World, tmp_path: pathlib.Path
) -> None:
    from test_checkpoints_tensor import (
        test_shards_of_other_sizes_move_where_data_parallel_ranks_cut as uneven,
    )

    def patch() -> None:
        kind: Any = contents.Contents
        kind.to_write = lambda self: iter(self.pieces)

    world4.run(patch)
    with pytest.raises(RankError, match="do not make up"):
        uneven(world4, tmp_path)
    world4.restart()  # the ranks, with the fault, were kept
    uneven(world4, tmp_path)
