"""Context beside data and tensor parallelism: which ranks average, what is refused."""

import copy
from typing import Any

import pytest
import torch

from context_checks import training_equals_one_process
from labkit import DDP, GPT, Comm, Mesh, NaiveDDP, World, ZeRO3, ZeroOptimizer, context_parallel
from labkit.parallel.common.ownership import marks_of
from labkit.parallel.common.shards import shard_of
from labkit.parallel.context.context_parallel import SequenceParts
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from tables import raises
from worlds import on_each_rank

VOCAB, LENGTH = 31, 16
STRATEGIES = [
    DDP,
    NaiveDDP,
    ZeRO3,
    lambda model, comm: ZeroOptimizer(model.parameters(), torch.optim.SGD, 1, comm, lr=1),
    lambda model, comm: ZeroOptimizer(model.parameters(), torch.optim.SGD, 2, comm, lr=1),
]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(VOCAB, 24, 1, 4, LENGTH, kv_heads=4).double()


@on_each_rank("world4")
def test_a_strategy_that_leaves_out_context_ranks_is_refused() -> None:
    mesh = Mesh(dp=2, cp=2)

    def wrap(strategy: Any, comm: Comm) -> Any:
        return strategy(context_parallel(gpt(), mesh.cp), comm)

    words = (f"ranks {list(mesh.cp.ranks)} use", 'mesh["dp", "cp"]',
             f"ranks {list(mesh.dp.ranks)} do not include all of them")  # fmt: skip
    for strategy in STRATEGIES:
        raises(words, wrap, strategy, mesh.dp)
    for strategy in (DDP, ZeRO3):
        wrap(strategy, mesh["dp", "cp"])


@on_each_rank("world4")
def test_a_strategy_that_was_there_before_is_refused_and_nothing_is_edited() -> None:
    mesh, model = Mesh(dp=2, cp=2), gpt()
    core = model.blocks[0].attn.core
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, 1, mesh.dp, lr=1)
    words = "belongs to a ZeroOptimizer over ranks", "context_parallel first"
    raises(words, context_parallel, model, mesh.cp)
    assert model.blocks[0].attn.core is core
    assert not any(marks_of(p) for p in model.parameters())
    del optimizer


@on_each_rank("world4")
def test_what_tensor_parallelism_cuts_keeps_the_mark() -> None:
    mesh = Mesh(dp=1, cp=2, tp=2)
    model = tensor_parallel(context_parallel(gpt(), mesh.cp), mesh.tp)
    assert all(SequenceParts(mesh.cp) in marks_of(p) for p in model.parameters())
    assert sum(shard_of(p) is not None for p in model.parameters()) > 5
    raises("do not include all of them", DDP, copy.deepcopy(model), mesh.dp)
    raises("do not include all of them", ZeRO3, model, mesh.dp)


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_sequences_are_cut_beside_heads_or_rows(world4: World, way: str) -> None:
    """Inside each tensor-parallel half of the heads, tokens of two ranks attend to each other."""
    heads, rows = {"dp": 1, "cp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 1}
    sequence = {"sequence": True}
    world4.run(training_equals_one_process, way, axes=heads, tensor={})
    world4.run(training_equals_one_process, way, axes=heads, tensor=sequence, tensor_first=True)
    world4.run(training_equals_one_process, way, axes=rows, tensor={})
