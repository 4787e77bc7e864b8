"""Which models a strategy can train on how many ranks: asked on paper, before any rank starts."""

import pytest
import torch

from labkit.holdings import Footprint
from labkit.models import GPT
from labkit.recipes import RECIPES, mesh_sizes


def unfit(name: str, length: int, ranks: int, heads: int = 4, kv_heads: int = 2) -> str:
    with torch.device("meta"):
        model = GPT(31, 24, 1, heads, 64, kv_heads=kv_heads)
    return RECIPES[name].unfit(model, 8, length, ranks)


@pytest.mark.parametrize("name", ["tensor", "sequence", "context"])
def test_one_rank_takes_any_length_and_heads(name: str) -> None:
    assert unfit(name, 7, 1, heads=3, kv_heads=3) == ""


def test_key_value_heads_divide_too() -> None:
    for name in ("tensor", "sequence"):
        assert unfit(name, 16, 2) == ""
        assert unfit(name, 16, 4) == "2 key-value heads cannot be split evenly over 4 ranks"
        assert unfit(name, 15, 3) == "4 heads cannot be split evenly over 3 ranks"
    assert unfit("context", 16, 4) == "", "the ring takes any heads"


def test_three_dimensions_share_the_ranks() -> None:
    found = {ranks: [*mesh_sizes(ranks).values()] for ranks in (1, 2, 3, 4, 6, 8, 12, 16)}
    assert found == {  # pp, dp, tp
        1: [1, 1, 1], 2: [1, 1, 2], 3: [1, 1, 3], 4: [2, 1, 2], 6: [3, 1, 2], 8: [2, 2, 2],
        12: [2, 3, 2], 16: [2, 2, 4],
    }  # fmt: skip
    assert unfit("three-d", 16, 2) == ""
    assert unfit("three-d", 16, 4) == "1 blocks are too few for 2 stages"
    assert unfit("three-d", 16, 3) == "4 heads cannot be split evenly over 3 ranks"
    assert unfit("three-d", 16, 12) == "8 rows cannot be split evenly over 3 replicas"


def test_a_sequence_divides() -> None:
    assert unfit("sequence", 15, 2) == "15 tokens cannot be split evenly over 2 ranks"
    assert unfit("tensor", 15, 2) == "", "tokens stay whole"
    assert unfit("context", 15, 2) == "15 tokens cannot be split into 4 equal chunks"
    assert unfit("context", 18, 2) == "18 tokens cannot be split into 4 equal chunks"


def test_gradients_of_frozen_parameters_are_not_summed_over_a_sequence() -> None:
    with torch.device("meta"):
        model = GPT(31, 24, 3, 4, 64)

    def footprint(name: str) -> Footprint:
        return RECIPES[name].footprint(model, 2, 64)

    before = {name: footprint(name).bus_bytes for name in ("tensor", "sequence")}
    norms_and_biases = [p for p in model.blocks.parameters() if p.ndim == 1]
    whole_bytes = sum(p.nbytes for block in model.blocks for p in (
        *block.norm1.parameters(), *block.norm2.parameters(), block.attn.out.bias,
        block.mlp.down.bias,
    ))  # fmt: skip
    for p in norms_and_biases:
        p.requires_grad_(False)
    assert footprint("tensor").bus_bytes == before["tensor"]
    assert footprint("sequence").bus_bytes == before["sequence"] - whole_bytes  # 2 (t-1)/t = 1
