"""The pipeline rows of the published activation table: what the first stage holds at its peak."""

import itertools
import weakref

import torch
from torch import Tensor, nn

from labkit import GPT, Comm, Pipeline, World, predict
from labkit.memory.saved import saved_by
from small_models import Custom

LENGTH, ROWS, WIDTH, HEADS, DEPTH, MICROBATCHES = 16, 2, 24, 4, 4, 4


class Kept:
    def __init__(self, x: Tensor):
        self.memory = x.untyped_storage()


def blocks(depth: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return GPT(32, WIDTH, depth, HEADS, LENGTH).bfloat16().blocks


def peak_bytes(schedule: str, chunks: int) -> int:
    """On a rank: all that its blocks keep for backward, at most, with every memory counted once."""
    comm, of_model = Comm(), blocks(DEPTH)
    weights = {p.untyped_storage()._cdata for p in of_model.parameters()}
    each = DEPTH // (comm.size * chunks)
    stages = [nn.Sequential(*of_model[k : k + each]) for k in range(0, DEPTH, each)]
    # In the place of an embedding: what blocks get has memory of its own.
    stages[0].insert(0, Custom(lambda self, x: x.clone()))
    alive: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
    numbers, peak = itertools.count(), 0

    def keep(x: Tensor) -> tuple[Kept, Tensor]:
        nonlocal peak
        kept = alive[next(numbers)] = Kept(x)
        memory = {one.memory._cdata: one.memory.nbytes() for one in alive.values()}
        peak = max(peak, sum(n for key, n in memory.items() if key not in weights))
        return kept, x.detach()

    pipe = Pipeline(stages, comm, schedule, MICROBATCHES, lambda y, _: y.float().mean())
    x = torch.randn(ROWS * MICROBATCHES, LENGTH, WIDTH, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept[1]):
        pipe.step(x, x)
    assert not alive, "nothing is kept after the step"
    return peak


def test_the_first_stage_keeps_what_the_table_says_and_gpipes_all(
    world2: World,
) -> None:
    """All layers' worth with 1F1B, though it has half of them; 1 + (p-1)/(pv) as much with chunks
    (arXiv 2205.05198, section 4.2.3). With GPipe m micro-batches of half the layers, so the count
    can tell them apart."""
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    each = sum(one.nbytes for one in saved_by(blocks(1)[0], x))  # of a block and a micro-batch
    for schedule, chunks, expected in (
        ("1f1b", 1, predict.first_stage_activation_bytes(each, DEPTH, 2, 1)),
        ("interleaved", 2, predict.first_stage_activation_bytes(each, DEPTH, 2, 2)),
        ("gpipe", 1, MICROBATCHES * each * DEPTH / 2),
    ):
        first, _ = world2.run(peak_bytes, schedule, chunks)
        assert first == expected, schedule
