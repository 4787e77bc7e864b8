"""What training in three dimensions must do, with and without faults. Three steps of momentum: a
plain one; one that all ranks skip, since a gradient of the first stage is inf on one rank; a
clipped one. Losses, norms, scales and weights are those of one process, bytes of each axis those of
its formula."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

from labkit import (
    GPT,
    Batch,
    Comm,
    GradScaler,
    MasterWeights,
    Mesh,
    Recompute,
    clip_grad_norm,
    full_state_dict,
    listen,
    loss,
    tensor_parallel,
)
from labkit.events import CommEvent
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.splitting import split
from labkit.predict.three_d import AXES, bytes_by_axis
from shard_cases import optimizer_of, wrapped
from small_models import difference
from tensor_contract import model_of

SHARDERS = ("ddp", "zero-1", "zero-2", "zero-3")
STEPS, SPOILED, MAX_NORM = 3, 1, 0.3
SGD = {"lr": 0.3, "momentum": 0.9}
SIZES = {"vocab": 11, "width": 8, "heads": 2, "context": 8}
LENGTH = 6
AGREE = {False: 1e-10, True: 4e-3}  # of float64, and of 16 bits (as in scaler_contract.py)


@dataclass(frozen=True)
class Case:
    """A way to train; of `mixed` precision: a model in fp16 under fp32 masters."""

    pp: int = 2
    dp: int = 2
    tp: int = 2
    sharder: str = "ddp"
    sequence: bool = False
    recompute: bool = False
    mixed: bool = False
    tied: bool = True
    depth: int = 2
    rows: int = 8
    microbatches: int = 2
    schedule: str = "1f1b"
    chunks: int = 1
    frozen: bool = False
    scatter_gather: bool = False

    def __str__(self) -> str:
        every = ("sequence", "recompute", "mixed", "scatter_gather")
        flags = [name for name in every if getattr(self, name)]
        return " ".join([f"pp{self.pp} dp{self.dp} tp{self.tp} {self.sharder}", *flags])

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def trains(self) -> "Case":
        keep = ("mixed", "tied", "depth", "rows", "frozen")
        return Case(1, 1, 1, **{name: getattr(self, name) for name in keep})


@dataclass
class Seen:
    """What a rank has seen; the losses of all replicas together, on the last stage."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    weights: dict[str, Tensor]
    where: dict[str, int] = field(default_factory=dict)
    sent: list[dict[str, int]] = field(default_factory=list)  # bus bytes of each step, by axis


# ---- the model and its batches


def model(case: Case) -> GPT:
    """Half of what is left is frozen, where some is: the first block, and all norms."""
    made = model_of(**SIZES, depth=case.depth, tied=case.tied)
    for name, p in made.named_parameters():
        p.requires_grad_(not case.frozen or ("norm" not in name and "blocks.0." not in name))
    # The masters of both are the same numbers, so that what differs are sums in 16 bits.
    return made.half() if case.mixed else made


def batch(case: Case, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(0, SIZES["vocab"], (2, case.rows, LENGTH), generator=generator)
    return Batch(x, y, y.numel())


class Spoil:
    """While `on`, one element that the embedding hands on has an infinite gradient."""

    def __init__(self, embed: nn.Module):
        self.on = False
        embed.register_forward_hook(self._watch)

    def _watch(self, embed: nn.Module, args: Any, out: Tensor) -> None:
        if self.on and out.requires_grad:
            out.register_hook(_spoiled)


def _spoiled(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[3] = torch.inf
    return gradient


# ---- one process


@cache
def alone(case: Case) -> Seen:
    """The oracle: plain torch, in this process, which is no rank."""
    whole = model(case)
    optimizer = MasterWeights(whole.parameters(), torch.optim.SGD, **SGD)
    spoil, scaler = Spoil(whole.embed), GradScaler(2.0**10, growth_interval=100)
    seen = Seen([], [], [], {})
    for step in range(STEPS):
        spoil.on = step == SPOILED
        optimizer.zero_grad()
        value = loss(whole(batch(case, step).x), batch(case, step))
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        seen.norms.append(clip_grad_norm(optimizer, MAX_NORM if step else 1e9).item())
        scaler.step(optimizer)
        scaler.update()
        seen.losses.append(value.item())
        seen.scales.append(scaler.get_scale())
    seen.weights = {name: x.double() for name, x in whole.state_dict().items()}
    return seen


# ---- ranks


@cache
def mesh_of(pp: int, dp: int, tp: int) -> Mesh:
    """On the first ranks of a world that is a multiple of it; the others have a copy, and rest."""
    return Mesh(copy=Comm().size // (pp * dp * tp), pp=pp, dp=dp, tp=tp)


def built(case: Case, mesh: Mesh) -> tuple[Pipeline, Any, Any, Spoil]:
    """One call each: edited, cut into stages, sharded, run."""
    edited: Any = tensor_parallel(model(case), mesh.tp, sequence=case.sequence)
    spoil = Spoil(edited.embed)
    if case.recompute:
        Recompute(edited, "full")
    half = torch.float16 if case.mixed else None
    if case.sharder == "zero-3":
        edited.float() if case.mixed else edited  # its shards are the masters
    wrap = partial(wrapped, case.sharder, comm=mesh.dp, compute_dtype=half)
    weigh = Weighted()
    pipe = Pipeline(
        split(edited, case.pp * case.chunks), mesh.pp, case.schedule, case.microbatches, weigh,
        wrap=wrap, scatter_gather=mesh.tp if case.scatter_gather else None,
    )  # fmt: skip
    parameters = list(pipe.parameters())
    sgd = partial(torch.optim.SGD, **SGD)
    if case.sharder == "zero-3":
        optimizer: Any = sgd([p for p in parameters if p.numel()])
    else:
        masters = case.sharder.replace("ddp", "masters")
        optimizer = optimizer_of(masters, parameters, sgd, mesh.dp, bucket_mb=25)
    pipe.weigh = weigh
    return pipe, optimizer, pipe if case.sharder == "zero-3" else optimizer, spoil


class Weighted:
    """The mean over the rows, times what these rows are of the global batch's."""

    share = 1.0

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return loss(logits, Batch(y, y, y.numel())) * self.share


def train(case: Case) -> Seen | None:
    """On a rank; None on those that rest."""
    mesh = mesh_of(case.pp, case.dp, case.tp)
    every = mesh["pp", "dp", "tp"]
    if mesh.copy.rank:
        return None
    pipe, optimizer, clipped, spoil = built(case, mesh)
    scaler = GradScaler(2.0**10, growth_interval=100, comm=every)
    seen = Seen([], [], [], {}, {axis: getattr(mesh, axis).rank for axis in ("pp", "dp", "tp")})
    for step in range(STEPS):
        mine = batch(case, step).slice(mesh.dp.rank, mesh.dp.size)
        spoil.on = step == SPOILED and every.rank == (case.dp - 1) * case.tp  # pp 0, tp 0
        pipe.weigh.share = mine.share
        optimizer.zero_grad()
        with listen() as events:
            value = pipe.step(mine.x, mine.y, scaler=scaler)
        scaler.unscale_(optimizer)
        seen.norms.append(clip_grad_norm(clipped, MAX_NORM if step else 1e9).item())
        with listen() as after:
            scaler.step(optimizer)
        scaler.update()
        total = (torch.zeros(()) if value is None else value).double().clone()
        mesh.dp.all_reduce(total, "mean")
        seen.losses.append(total.item())
        seen.scales.append(scaler.get_scale())
        seen.sent.append(by_axis([*events, *after], mesh))
    seen.weights = {name: x.double() for name, x in full_state_dict(pipe).items()}
    return seen


def by_axis(events: list[CommEvent], mesh: Mesh) -> dict[str, int]:
    """Bus bytes, by the group that carried them. (What a message looks like is not counted: tag
    103.) The two ends of a pipeline are its group where there are but two, and sum there."""
    axis_of = {mesh.tp.ranks: "tensor", mesh.dp.ranks: "data", mesh.pp.ranks: "pipeline"}
    found: Counter[str] = Counter()
    for event in events:
        axis = axis_of.get(event.ranks, "embedding")
        if axis == "pipeline" and event.op != "send" and event.op != "recv":
            axis = "embedding"
        found[axis] += event.bus_bytes * (event.tag != 103)
    return {axis: found[axis] for axis in AXES}


# ---- the promises


def check(case: Case, ranks: list[Seen | None]) -> None:
    right, agree = alone(case.trains), AGREE[case.mixed]
    there = [one for one in ranks if one is not None]
    assert len(there) == case.ranks
    scales = {f"{case}, {one.where}": one.scales for one in there}
    for at, found in scales.items():
        assert found == right.scales, f"{at}: scales {found}, not {right.scales}"
    for one in there:
        at = f"{case}, {one.where}"
        if one.where["pp"] == case.pp - 1:
            far = [abs(a - b) / b for a, b in zip(one.losses, right.losses, strict=True)]
            assert max(far) <= agree, f"{at}: losses {one.losses}, not {right.losses}"
        for step, (norm, wanted) in enumerate(zip(one.norms, right.norms, strict=True)):
            if step == SPOILED:
                assert norm == wanted == torch.inf or norm != norm, f"{at}: norm {norm}"
            else:
                far_norm = abs(norm - wanted) / wanted
                assert far_norm <= 10 * agree, f"{at}: norm of step {step} {norm}, not {wanted}"
        off = difference(one.weights, right.weights)
        assert off <= agree, f"{at}: the model is off by {off:.1e}"
    if case.rows % case.dp == 0 and not case.frozen:
        check_bytes(case, there)


def check_bytes(case: Case, ranks: list[Seen]) -> None:
    """Steps are alike but for the skipped one, without ZeRO's gather; ranks of a stage together."""
    predicted = predicted_bytes(case)
    for stage, wanted in enumerate(predicted):
        here = [one for one in ranks if one.where["pp"] == stage]
        for step in range(STEPS):
            if step == SPOILED and case.sharder in ("zero-1", "zero-2"):
                continue
            for axis in AXES:
                found = sum(one.sent[step][axis] for one in here)
                total = round(wanted[axis] * len(here), 6)
                at = f"{case}, stage {stage}, step {step}"
                assert found == total, f"{at}: {axis} {found} bytes, not {total}"


def predicted_bytes(case: Case) -> list[dict[str, float]]:
    return bytes_by_axis(
        vocab=SIZES["vocab"], width=SIZES["width"], depth=case.depth, context=SIZES["context"],
        rows=case.rows // case.dp, sequence=LENGTH, microbatches=case.microbatches, pp=case.pp,
        dp=case.dp, tp=case.tp, chunks=case.chunks, zero=SHARDERS.index(case.sharder),
        sequence_parallel=case.sequence, recompute=case.recompute, tied=case.tied,
        scatter_gather=case.scatter_gather, element_bytes=2 if case.mixed else 8,
    )  # fmt: skip


# ---- the grid


def hard_cases() -> list[Case]:
    """What does not divide, comes in chunks or is not trained; those on six ranks first."""
    chunks: dict[str, Any] = {"schedule": "interleaved", "chunks": 2}
    return [
        Case(3, 1, 2, depth=5, rows=7, microbatches=3),
        Case(3, 2, 1, "zero-1", depth=5, rows=14, microbatches=3),
        Case(3, 1, 2, depth=5, rows=7, microbatches=3, scatter_gather=True),
        Case(depth=4, **chunks),
        Case(sharder="zero-1", sequence=True, depth=5, **chunks),
        Case(2, 2, 1, "zero-3", tied=False, depth=4, **chunks),
        Case(recompute=True, scatter_gather=True),
        Case(sharder="zero-1", mixed=True, depth=5, scatter_gather=True, **chunks),
        Case(frozen=True),
        Case(sharder="zero-1", frozen=True, microbatches=3),
        Case(sharder="zero-3", tied=False, frozen=True),
        Case(sharder="zero-1", rows=7, microbatches=3),
        Case(schedule="zb-h1"),
        Case(2, 2, 1, "zero-1", schedule="zb-h1"),
    ]


def every_case() -> list[Case]:
    """Each distinct combination; ZeRO-3 refuses a tied embedding over stages."""
    found = []
    twice = (False, True)
    for pp, dp, tp in product((1, 2), repeat=3):
        for sharder in SHARDERS if dp == 2 else SHARDERS[:1]:
            for sequence, recompute, mixed in product(twice if tp == 2 else (False,), twice, twice):
                tied = not (sharder == "zero-3" and pp == 2)
                found.append(Case(pp, dp, tp, sharder, sequence, recompute, mixed, tied))
    return found


FACTORS = ("pp", "dp", "tp", "sharder", "sequence", "recompute", "mixed")


def pairs_of(case: Case) -> set[Any]:
    return set(combinations([(name, getattr(case, name)) for name in FACTORS], 2))


def covering() -> list[Case]:
    """A few cases with every pair of choices: greedily, of equals the one on fewest ranks."""
    every = every_case()
    missing: set[Any] = set().union(*map(pairs_of, every))
    chosen = []
    while missing:
        best = max(every, key=lambda case: (len(pairs_of(case) & missing), -case.ranks))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
