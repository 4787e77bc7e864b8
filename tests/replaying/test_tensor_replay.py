"""Tensor parallelism belongs inside a node: one step of 8 ranks, replayed on 1 to 8 nodes."""

from dataclasses import replace

import pytest
import torch

from labkit import GPT, attach, cluster, dry_run, replay, split_of, tensor_parallel
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.trace import Trace

RANKS, ROWS, DEPTH, WIDTH, LENGTH = 8, 2, 2, 3072, 2048
X_BYTES = LENGTH * WIDTH * 2  # of a row of x, in bfloat16


def train(sequence: bool) -> None:
    comm = attach().comm
    model = GPT(8192, WIDTH, DEPTH, heads=24, context=LENGTH).bfloat16()
    tensor_parallel(model, comm, sequence=sequence, gather_logits=False)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    for _ in range(2):
        optimizer.zero_grad()
        vocab_parallel_cross_entropy(model(tokens), tokens, comm).backward()
        optimizer.step()


@pytest.fixture(scope="module", params=[False, True], ids=["tensor", "sequence"])
def step(request: pytest.FixtureRequest) -> Trace:
    return dry_run(train, request.param, ranks=RANKS)


def test_the_activations_of_a_step_travel(step: Trace) -> None:
    """In units of x, of which a gather or a scatter sends one and an all-reduce two: a layer sends
    8, or 10 where parts of x are kept and gathered again; embedding and head 4, or 5."""
    large = [event for event in step.ranks[0].comms if event.payload_bytes == ROWS * X_BYTES]
    ops, units = {"all_reduce"}, 8 * DEPTH + 4
    if large[0].op == "reduce_scatter":
        ops, units = {"all_gather", "reduce_scatter"}, 10 * DEPTH + 5
    assert {event.op for event in large} == ops
    unit = (RANKS - 1) / RANKS * ROWS * X_BYTES
    assert sum(event.bus_bytes for event in large) == units * unit


def test_more_nodes_make_it_wait_for_messages(step: Trace) -> None:
    shares = []
    for nodes in (1, 2, 4, 8):
        where = replace(cluster("selene"), nodes=nodes, devices_per_node=RANKS // nodes)
        split = split_of(replay(step, where))
        shares.append(split.exposed_s / split.step_s)
    assert shares == sorted(shares)
    assert shares[0] < 0.4 and shares[-1] > 0.7 and shares[-1] > 2 * shares[0]
