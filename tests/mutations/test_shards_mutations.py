"""Faults with shards of parameters must turn tests red."""

import pathlib
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from harness import Change, Replacement, around, edits, instead, noticed, on_ranks
from labkit import GradScaler, Mesh, RankError, World, load_checkpoint, save_checkpoint
from labkit.checkpoints import boxes, contents, loading, saving, stored
from labkit.checkpoints.boxes import Box, in_whole
from labkit.parallel.common import clipping
from labkit.parallel.zero import shares
from labkit.parallel.zero3 import flat
from labkit.precision import scaler as scaling
from shard_cases import alone, built, train
from test_checkpoints_tensor import AGREE, EARLY, LATE, expected_losses
from test_checkpoints_tensor import (
    test_shards_of_other_sizes_move_where_data_parallel_ranks_cut as uneven,
)
from test_clipping_shards import DP_TP, SGD, clipped_step, spoiled_step

pytestmark = pytest.mark.slow


def clips(world: World, strategy: str) -> None:
    for off in world.run(clipped_step, strategy, DP_TP, 2.0, 0.01):
        assert max(off) < AGREE


CUT_OVER = "(shard and shard.comm.ranks) == (group and group.ranks)"
NORMS = [
    *edits(
        clipping,
        *(("sums over tensor ranks what all of them have",
           CUT_OVER, "group is not None", clips, strategy)
          for strategy in ("ddp", "zero-2", "zero-3")),
        *(("each tensor rank takes its shards for everything",
           CUT_OVER, "group is None", clips, strategy)
          for strategy in ("ddp", "zero-1", "zero-3")),
    ),
    *edits(shares, ("unmarks slices", "piece.piece_of = p", "pass", clips, "zero-1")),
    *edits(flat, ("unmarks shards", "in marks_of(parameter):", "in ():", clips, "zero-3")),
]  # fmt: skip
test_a_wrong_norm_is_noticed = noticed(NORMS, around, size=4)


def test_a_scaler_that_asks_only_the_replicas_lets_ranks_diverge(worlds: Any) -> None:
    """The very fault that `check_owner` refuses."""

    def run() -> int:
        mesh = Mesh(**DP_TP)
        model, optimizer = built("zero-1", mesh, SGD)
        with patch.object(scaling, "check_owner", lambda *_: None):
            scaler = GradScaler(comm=mesh.dp)
            spoiled_step(scaler, model, optimizer, mesh.dp)
        return scaler.skipped

    assert worlds(4).run(run) == [0, 1, 0, 1]


def keeps_padding(box: Box, shard: Any) -> Box | None:
    if shard is None:
        return box
    offsets = [at + shard.start * (d == shard.dim) for d, at in enumerate(box.offsets)]
    return Box(tuple(offsets), box.sizes)


def forgets_start(box: Box, shard: Any) -> Box | None:
    """As if every shard were the first."""
    placed = in_whole(box, shard)
    return placed and Box(box.offsets, placed.sizes)


def with_boxes(label: str, owner: Any, in_whole: Any) -> Replacement:
    """`owner` has its boxes where `in_whole` says."""

    def make(real: Any) -> Any:
        def placed_boxes(*args: Any) -> list[Any]:
            with patch.object(boxes, "in_whole", in_whole):
                return list(real(*args))

        return placed_boxes

    return Replacement(owner, "placed_boxes", make, label)


writes_padding = with_boxes("writes_padding", saving, keeps_padding)
saves_without_start = with_boxes("saves_without_start", saving, forgets_start)
loads_without_start = with_boxes("loads_without_start", stored, forgets_start)
# A moment of the whole shape is not seen to be cut like its parameter.
takes_moments_for_one_number = instead(
    "takes_moments_for_one_number", loading, "is_per_element",
    lambda key, shape, parameter: shape == parameter and key == "exp_avg",
)  # fmt: skip
# A parameter that is cut is written as if its shard were the whole.
writes_the_shape_of_the_shard = instead(
    "writes_the_shape_of_the_shard", contents, "shard_of", lambda parameter: None
)


def goes_on(world: World, change: Change, strategy: str, folder: pathlib.Path) -> None:
    def run() -> list[float]:
        mesh = Mesh(**DP_TP)
        model, optimizer = built(strategy, mesh)
        train(model, optimizer, mesh.dp, EARLY)
        save_checkpoint(folder, model, optimizer)
        model, optimizer = built(strategy, mesh, seed=1)
        load_checkpoint(folder, model, optimizer)
        return train(model, optimizer, mesh.dp, LATE)

    expected = expected_losses()
    for losses in on_ranks(world, change, run):
        assert losses == pytest.approx(expected, abs=AGREE, rel=0)
    model, optimizer = alone(seed=2)
    load_checkpoint(folder, model, optimizer)
    assert train(model, optimizer, None, LATE) == pytest.approx(expected, abs=AGREE, rel=0)


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-3"])
@pytest.mark.parametrize(
    "fault",
    [writes_padding, saves_without_start, loads_without_start, takes_moments_for_one_number,
     writes_the_shape_of_the_shard],
    ids=str,
)  # fmt: skip
def test_a_faulty_checkpoint_is_noticed(
    worlds: Any, tmp_path: pathlib.Path, fault: Replacement, strategy: str
) -> None:
    with pytest.raises((AssertionError, RankError, ValueError)):
        goes_on(worlds(4), fault, strategy, tmp_path)


def test_without_a_fault_all_is_green(worlds: Any, tmp_path: pathlib.Path) -> None:
    for strategy in ("ddp", "zero-1", "zero-3"):
        goes_on(worlds(4), nullcontext, strategy, tmp_path / strategy)
        clips(worlds(4), strategy)


def test_values_that_all_tensor_ranks_write_are_noticed_where_they_cut_differently(
    worlds: Any, tmp_path: pathlib.Path
) -> None:
    every_rank_writes = instead(
        "every_rank_writes", contents.Contents, "to_write", lambda self: iter(self.pieces)
    )
    with pytest.raises(RankError, match="do not make up"):
        around(worlds(4), every_rank_writes, uneven, tmp_path)
    uneven(worlds(4), tmp_path)
