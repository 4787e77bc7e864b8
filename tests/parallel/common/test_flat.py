"""The flat partition: every element in one share, all shares of one size."""

import pytest
import torch

from labkit.parallel.common.flat import FlatPartition

SHAPES = [torch.Size(s) for s in ([3, 5], [0], [7], [], [2, 2, 2])]  # 31 elements


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 40])
def test_each_element_lies_in_one_share(ranks: int) -> None:
    layout = FlatPartition(SHAPES, ranks)
    assert layout.numel == 31 and layout.share * ranks == layout.padded
    assert 0 <= layout.padded - layout.numel < ranks
    buffer = torch.arange(layout.padded)
    found: dict[int, list[int]] = {index: [] for index in range(len(SHAPES))}
    for rank in range(ranks):
        share = layout.share_of(buffer, rank)
        assert share.numel() == layout.share
        assert share.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        for piece in layout.pieces(rank):
            assert piece.start == len(found[piece.index])
            found[piece.index] += share[piece.at : piece.at + piece.numel].tolist()
    for index, view in enumerate(layout.views(buffer)):
        assert view.shape == SHAPES[index] and found[index] == view.reshape(-1).tolist()


def test_no_tensors_make_empty_shares() -> None:
    layout = FlatPartition([], 3)
    assert layout.padded == 0 and list(layout.pieces(1)) == []
