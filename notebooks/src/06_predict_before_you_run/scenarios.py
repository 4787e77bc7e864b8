"""DDP steps for the open exercise of lab 06, recorded in dry runs and replayed on clusters."""

from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.nn.functional as F

from labkit.clusters import Cluster, cluster
from labkit.models import GPT
from labkit.parallel import DDP
from labkit.replaying import dry_run, replay
from labkit.trace import Trace, split_of

RANKS = 32
MODELS = (  # MB per bucket, rows, sizes; in turn: large vocabulary, small buckets, wide layers
    (25, 2, {"vocab": 32_000, "width": 768, "depth": 3, "heads": 12, "context": 512}),
    (4, 4, {"vocab": 8_192, "width": 512, "depth": 4, "heads": 8, "context": 512}),
    (10, 1, {"vocab": 1_024, "width": 2048, "depth": 2, "heads": 16, "context": 1024}),
)


@dataclass(frozen=True)
class Facts:
    """The facts of a DDP step. Seconds of computation include no waiting."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    bucket_bytes: tuple[int, ...]  # in the order of sending; the last has the embedding
    bucket_s: tuple[float, ...]  # each all-reduce, latency included
    head_part: float  # the head's share of backward's FLOPs, 0 to 1; backward begins with the head


@cache
def steps() -> list[tuple[str, Facts, float]]:
    """Each configuration's name, its facts, and the replayed seconds of a step."""
    configurations = []
    for bucket_mb, rows, sizes in MODELS:
        trace = dry_run(partial(_train, bucket_mb, rows, sizes), ranks=RANKS)
        tokens, width = rows * sizes["context"], sizes["width"]
        head = tokens * width * sizes["vocab"]
        layer = 12 * tokens * width**2 + 2 * tokens * sizes["context"] * width
        head_part = head / (head + sizes["depth"] * layer)
        for target in _clusters():
            name = f"width {width}, depth {sizes['depth']}, on {target.name}"
            configurations.append((name, *_facts(trace, target, head_part)))
    return configurations


def _train(bucket_mb: float, rows: int, sizes: dict[str, int]) -> None:
    model = DDP(GPT(**sizes), bucket_mb=bucket_mb)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(rows, sizes["context"], dtype=torch.long)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def _clusters() -> list[Cluster]:
    selene = cluster("selene")
    assert selene.between is not None
    slower = replace(selene, name="a slower selene", between=replace(selene.between, ports=1))
    return [cluster("v100-cloud"), slower, selene, cluster("dgx-h100")]


def _facts(trace: Trace, target: Cluster, head_part: float) -> tuple[Facts, float]:
    replayed, computing = replay(trace, target), replay(trace, _with_free_links(target)).ranks[0]
    step = computing.steps[0]
    (backward,) = [x for x in computing.spans if x.phase == "backward" and x.depth == 0]
    sent = replayed.ranks[0].comms
    facts = Facts(
        backward.began_s - step.began_s,
        backward.ended_s - backward.began_s,
        step.ended_s - backward.ended_s,
        tuple(event.payload_bytes for event in sent),
        tuple(event.ended_s - event.began_s for event in sent),
        head_part,
    )
    return facts, split_of(replayed).step_s


def _with_free_links(target: Cluster) -> Cluster:
    assert target.between is not None
    free = {"bytes_per_s": 1e30, "latency_s": 0.0, "start_s": 0.0}
    inside, between = (replace(level, **free) for level in (target.inside, target.between))  # type: ignore[arg-type]
    return replace(target, inside=inside, between=between)
