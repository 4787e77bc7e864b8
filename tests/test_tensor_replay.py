"""Why tensor parallelism stays inside the node: the same step of 8 ranks, recorded without data and
replayed on one node of 8 GPUs, and spread over more and more nodes of as many GPUs in all."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from labkit import GPT, attach, dry_run, replay, split_of
from labkit.clusters import cluster
from labkit.parallel.tensor import tensor_parallel
from labkit.parallel.vocab_parallel import vocab_parallel_cross_entropy
from labkit.trace import Trace

RANKS, DEPTH, WIDTH, LENGTH = 8, 2, 3072, 2048
X_BYTES = LENGTH * WIDTH * 2  # of x, in bfloat16


def train(sequence: bool) -> None:
    comm = attach().comm
    model = GPT(8192, WIDTH, DEPTH, heads=24, context=LENGTH).bfloat16()
    tensor_parallel(model, comm, sequence=sequence, gather_logits=False)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    for _ in range(2):
        optimizer.zero_grad()
        vocab_parallel_cross_entropy(model(tokens), tokens, comm).backward()
        optimizer.step()


def exposed(trace: Trace, nodes: int) -> float:
    """The share of a step in which a rank waits for its messages, on so many nodes of Selene."""
    where = replace(cluster("selene"), nodes=nodes, devices_per_node=RANKS // nodes)
    split = split_of(replay(trace, where))
    return split.exposed_s / split.step_s


@pytest.fixture(scope="module", params=[False, True], ids=["tensor", "sequence"])
def step(request: pytest.FixtureRequest) -> Trace:
    return dry_run(train, request.param, ranks=RANKS)


def test_the_activations_of_a_step_travel(step: Trace) -> None:
    """In units of x: an all-reduce counts twice a gather or a scatter, and a layer sends 8 of them,
    or 10 where parts of x are kept; two more of each for embedding and head, 2 units at each end.
    """
    sent = Counter[str]()
    for event in step.ranks[0].comms:
        if event.payload_bytes == X_BYTES:
            sent[event.op.partition("(")[0]] += event.bus_bytes
    unit = (RANKS - 1) / RANKS * X_BYTES
    layer = 10 if "all_gather" in sent else 8
    assert sum(sent.values()) == unit * (layer * DEPTH + 4)
    assert set(sent) in ({"all_reduce"}, {"all_gather", "reduce_scatter"})


def test_more_nodes_make_it_wait_for_messages(step: Trace) -> None:
    """On one node it computes most of the time; on eight, with one GPU each, it mostly waits."""
    shares = [exposed(step, nodes) for nodes in (1, 2, 4, 8)]
    assert shares == sorted(shares)
    assert shares[0] < 0.3 and shares[-1] > 0.6 and shares[-1] > 2.5 * shares[0]
