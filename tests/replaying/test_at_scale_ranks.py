"""The report of a layout beside eight real ranks: what they sent along each axis, and held."""

from collections import Counter
from functools import partial

import pytest
import torch

from labkit import DDP, GPT, MasterWeights, Mesh, Pipeline, World, ZeroOptimizer, record, split
from labkit.clusters import cluster
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.step_model import StepModel
from labkit.replaying.planning.steps import step_report
from labkit.trace import CATEGORIES

pytestmark = pytest.mark.slow
SIZES = Sizes(width=32, depth=4, heads=4, context=16, vocab=64)
BATCH, MICRO = 16, 2  # rows: 8 for each replica, 4 micro-batches

Found = tuple[Counter[str], dict[str, int], int]


def train(sequence: bool, zero: int = 0) -> Found:
    """Two steps. Of the second: what this rank sent along each axis; what it held at most in its
    pipeline, by category; and what held "other" when the step began (the batch, garbage)."""
    mesh = Mesh(pp=2, dp=2, tp=2)
    with record(detail_step=1) as trace:
        model = GPT(SIZES.vocab, SIZES.width, SIZES.depth, SIZES.heads, SIZES.context)
        tensor_parallel(model.bfloat16(), mesh.tp, sequence=sequence, gather_logits=False)
        stages = split(model, 2)
        if not zero:
            stages[mesh.pp.rank] = DDP(stages[mesh.pp.rank], mesh.dp)
        loss = partial(vocab_parallel_cross_entropy, comm=mesh.tp)
        pipeline = Pipeline(stages, mesh.pp, "1f1b", BATCH // 2 // MICRO, loss)
        del model, stages  # the other stage is nothing of this rank's
        trained = list(pipeline.parameters())
        optimizer: MasterWeights | ZeroOptimizer = MasterWeights(trained, torch.optim.AdamW)
        if zero:
            optimizer = ZeroOptimizer(trained, torch.optim.AdamW, zero, mesh.dp)
        x = torch.zeros(BATCH // 2, SIZES.context, dtype=torch.long)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)  # they stay in DDP's buckets
            pipeline.step(x, x)
            optimizer.step()
    (step,) = trace.step(1).ranks.values()
    axes = {mesh.tp.ranks: "tensor", mesh.dp.ranks: "data", mesh.pp.ranks: "pipeline"}
    sent: Counter[str] = Counter()
    for event in step.comms:
        sent[axes[tuple(event.ranks)]] += event.bus_bytes
    (began_s,) = (x.began_s for x in step.spans if x.kind == type(optimizer).__name__)
    before = [dict(zip(CATEGORIES, x.held_bytes)) for x in step.memory if x.when_s < began_s]
    # What is new is entered as a gradient a moment later.
    most = max(before, key=lambda held: (sum(held.values()), held["gradients"]))
    return sent, most, before[0]["other"]


def test_eight_ranks_send_and_hold_what_the_report_says() -> None:
    """Bytes of each axis are exact; so are parameters, gradients and the optimizer's state, and
    the sum of all else, but for a message more or less: one is held until the other end has taken
    it, which is a matter of time. (It is an activation where it is computed, and other where it
    comes in.) Memory is that of the first stage, which holds the most.

    The embedding is tied: under ZeRO its ends sum a share of its gradient. What of Adam's counts of
    steps a rank has there depends on where shares end, and the report has all of them."""
    with World(8) as world:
        for sequence, zero in ((False, 0), (True, 0), (False, 1)):
            found = world.run(train, sequence, zero)
            layout = Layout(2, 2, 2, MICRO, zero=zero, sequence=sequence, scatter_gather=False)
            report = step_report(SIZES, layout, BATCH, cluster("selene"))
            for axis, sent_bytes in report.sent_bytes.items():
                assert sent_bytes == max(sent[axis] for sent, _, _ in found)
            _, held, other_bytes = found[0]
            states = ("parameters", "gradients", "optimizer state")
            for name in states[: 2 if zero else 3]:
                assert held[name] == report.memory_bytes[name]
            masters = 12 / 2 * held["parameters"] / 2  # of dp shares, without counts
            assert masters < held["optimizer state"] <= report.memory_bytes["optimizer state"]
            rest_bytes = sum(held[name] for name in CATEGORIES if name not in states) - other_bytes
            expected = sum(report.memory_bytes[n] for n in CATEGORIES if n not in states)
            message_bytes = StepModel(SIZES, layout, BATCH, cluster("selene")).message_bytes
            assert abs(rest_bytes - expected) in (0, message_bytes)
