"""A recipe per strategy: how to wrap a model and create its optimizer. `labkit compare` and
`labkit run` train with these recipes; add a new strategy here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm import Comm, Mesh
from labkit.comm.mesh import coordinates
from labkit.data import Batch, loss
from labkit.holdings import Footprint
from labkit.models import GPT
from labkit.parallel import DDP, NaiveDDP, ParameterServer, Single, ZeRO3, ZeroOptimizer
from labkit.parallel.context.context_parallel import context_parallel
from labkit.parallel.context.zigzag import sequence_shard
from labkit.parallel.pipeline.pipeline import Pipeline
from labkit.parallel.splitting import split
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.parallel.tensor.validation import layers_to_shard
from labkit.predict.context import ring_attention_bytes
from labkit.predict.three_d import bytes_by_axis


def rows(batch: Batch, comm: Comm) -> Batch:
    """Data parallelism: this rank's rows."""
    return batch.slice(comm.rank, comm.size)


def everything(batch: Batch, comm: Comm) -> Batch:
    """Tensor and pipeline parallelism: the same batch on every rank."""
    return batch


def positions(batch: Batch, comm: Comm) -> Batch:
    """Context parallelism: this rank's positions of every row."""
    x, y = sequence_shard(batch.x, comm), sequence_shard(batch.y, comm)
    return replace(batch, x=x, y=y, ranks=batch.ranks * comm.size)


def forward_backward(wrapped: nn.Module, batch: Batch, comm: Comm) -> Tensor:
    """The `step` of most strategies: compute gradients; returns the loss of this rank's share."""
    value = loss(wrapped(batch.x), batch)
    value.backward()
    return value.detach()


def adamw(wrapped: nn.Module, comm: Comm, lr: float) -> torch.optim.Optimizer:
    """AdamW on the parameters of the parallel model."""
    return torch.optim.AdamW(wrapped.parameters(), lr=lr)


@dataclass(frozen=True)
class Recipe:
    """`wrap(module, comm)` returns the parallel model, `optimizer(wrapped, comm, lr)` its
    optimizer, `share(batch, comm)` this rank's share of a global batch, `predict(module, size)` its
    footprint (unless `share` is `rows`, also pass the batch's token count). `unfit(model, rows,
    length, ranks)` returns why the sizes do not fit, or "". `step(wrapped, batch, comm)` computes
    gradients and returns a loss whose mean over ranks is the batch's loss."""

    name: str
    family: str
    wrap: Callable[[Any, Comm], nn.Module]
    predict: Callable[..., Footprint]
    share: Callable[[Batch, Comm], Batch] = rows
    optimizer: Callable[[Any, Comm, float], torch.optim.Optimizer] = adamw
    one_rank: bool = False
    unfit: Callable[[GPT, int, int, int], str] = lambda model, rows, length, ranks: ""
    step: Callable[[Any, Batch, Comm], Tensor] = forward_backward

    def build(
        self, module: nn.Module, comm: Comm, lr: float
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped = self.wrap(module, comm)
        return wrapped, self.optimizer(wrapped, comm, lr)

    def footprint(self, module: nn.Module, size: int, tokens: int) -> Footprint:
        """Predicted bytes per rank for a step on a global batch of `tokens` tokens."""
        return self.predict(module, size, *([] if self.share is rows else [tokens]))


def _zero(stage: int) -> Recipe:
    def optimizer(module: nn.Module, comm: Comm, lr: float) -> torch.optim.Optimizer:
        return ZeroOptimizer(module.parameters(), torch.optim.AdamW, stage, comm, lr=lr)

    return Recipe(
        f"zero-{stage}", "ZeRO", lambda module, comm: module,
        partial(ZeroOptimizer.predict, stage=stage), optimizer=optimizer,
    )  # fmt: skip


def _heads_problem(model: GPT, rows: int, length: int, ranks: int) -> str:
    for count, what in ((model.heads, "heads"), (model.kv_heads, "key-value heads")):
        if count % ranks:
            return f"{count} {what} cannot be split evenly over {ranks} ranks"
    return ""


def _sequence_problem(model: GPT, rows: int, length: int, ranks: int) -> str:
    uneven = f"{length} tokens cannot be split evenly over {ranks} ranks" if length % ranks else ""
    return _heads_problem(model, rows, length, ranks) or uneven


def held_bytes(module: Any, size: int) -> dict[Tensor, int]:
    """Bytes per parameter of a plain model on one of `size` tensor-parallel ranks."""
    vocabulary = {part.tokens.weight for part in module.modules() if hasattr(part, "tokens")}
    vocabulary |= {*getattr(module, "head", nn.Module()).parameters()}
    cut: set[Tensor] = set()
    for _, layer, columns, row in layers_to_shard(module):
        cut.update(p for name in columns for p in getattr(layer, name).parameters())
        cut.add(getattr(layer, row).weight)
    return {
        p: ceil(p.shape[0] / size) * p[0].nbytes if p in vocabulary
        else p.nbytes // size if p in cut
        else p.nbytes
        for p in module.parameters()
    }  # fmt: skip


def _chunks_problem(model: GPT, rows: int, length: int, ranks: int) -> str:
    uneven = ranks > 1 and length % (2 * ranks)
    return f"{length} tokens cannot be split into {2 * ranks} equal chunks" if uneven else ""


def _context_footprint(module: GPT, size: int, tokens: int) -> Footprint:
    """DDP's footprint, plus the k and v sent around the ring in every layer."""
    weights, item_bytes = DDP.predict(module, size), module.head.weight.element_size()
    keys = (tokens, 1, module.kv_heads, module.width // module.heads, size, item_bytes)
    ring_bytes = ring_attention_bytes(*keys) + ring_attention_bytes(*keys, backward=True)
    return replace(weights, bus_bytes=weights.bus_bytes + module.depth * ring_bytes)


def _pipeline(module: nn.Module, comm: Comm, wrap: Any = None) -> Pipeline:
    return Pipeline(split(module, comm.size), comm, "1f1b", MICROBATCHES, _mean_loss, wrap=wrap)


def _mean_loss(logits: Tensor, y: Tensor) -> Tensor:
    return loss(logits, Batch(y, y, y.numel()))


def _pipeline_step(wrapped: Pipeline, batch: Batch, comm: Comm) -> Tensor:
    """Only the last stage returns a loss; it is scaled so that the mean over ranks is correct."""
    value = wrapped.step(batch.x, batch.y)
    return torch.zeros(()) if value is None else value * wrapped.comm.size


def _stages_problem(model: GPT, rows: int, length: int, ranks: int) -> str:
    if rows < MICROBATCHES:
        return f"{rows} rows are too few for {MICROBATCHES} micro-batches"
    return f"{model.depth} blocks are too few for {ranks} stages" if model.depth < ranks else ""


def mesh_sizes(ranks: int) -> dict[str, int]:
    """Ranks per axis, tensor innermost: the prime factors of `ranks`, assigned to the axes in turn,
    starting with tp, which sends the most. 2 ranks form tp 2; 4 ranks form pp 2 x tp 2."""
    sizes, axes, factor = {"pp": 1, "dp": 1, "tp": 1}, cycle(["tp", "pp", "dp"]), 2
    while ranks > 1:
        while ranks % factor:
            factor += 1
        sizes[next(axes)] *= factor
        ranks //= factor
    return sizes


def _replica_rows(batch: Batch, comm: Comm) -> Batch:
    """3D parallelism: the rows of this rank's data-parallel index."""
    sizes = mesh_sizes(comm.size)
    return batch.slice(coordinates(sizes, comm.rank)["dp"], sizes["dp"])


def _three_d(module: nn.Module, comm: Comm) -> Pipeline:
    mesh = Mesh(comm, **mesh_sizes(comm.size))
    return _pipeline(tensor_parallel(module, mesh.tp), mesh.pp, partial(DDP, comm=mesh.dp))


def _mesh_footprint(
    module: GPT, size: int, tokens: int, axis: str = "", sequence: bool = False
) -> Footprint:
    """The mean footprint over ranks, for 3D parallelism or along one `axis`. With `sequence`,
    gradients of frozen unsharded parameters are not all-reduced."""
    sizes = {"pp": 1, "dp": 1, "tp": 1, axis: size} if axis else mesh_sizes(size)
    held = held_bytes(module, sizes["tp"])
    stages = [[*stage.parameters()] for stage in split(module, sizes["pp"])]
    trained = [p for stage in stages for p in stage if p.requires_grad]
    gradient_bytes = sum(held[p] for p in trained)
    sent = bytes_by_axis(
        pp=sizes["pp"], dp=sizes["dp"], tp=sizes["tp"], vocab=module.vocab, width=module.width,
        depth=module.depth, context=module.context,
        key_width=module.width // module.heads * module.kv_heads, tied=module.tied,
        rows=1, sequence=tokens // sizes["dp"], sequence_parallel=sequence,
        element_bytes=module.head.weight.element_size(),
    )  # fmt: skip
    frozen = [p for stage in stages for p in stage if sequence and not p.requires_grad]
    unsent = sum(p.nbytes for p in frozen if held[p] == p.nbytes) * 2 * (1 - 1 / sizes["tp"])
    return Footprint(
        sum(held[p] for stage in stages for p in stage) / len(stages),
        gradient_bytes / len(stages),
        (2 * gradient_bytes + 4 * len(trained)) / len(stages),
        (sum(sum(stage.values()) for stage in sent) - unsent) / len(stages),
    )


def _three_d_problem(model: GPT, rows: int, length: int, ranks: int) -> str:
    sizes = mesh_sizes(ranks)
    if rows % sizes["dp"]:
        return f"{rows} rows cannot be split evenly over {sizes['dp']} replicas"
    local = model, rows // sizes["dp"], length
    return _heads_problem(*local, sizes["tp"]) or _stages_problem(*local, sizes["pp"])


MICROBATCHES = 4  # per pipeline step
RECIPES = {  # by default, `labkit compare` runs a family's last recipe that fits
    recipe.name: recipe
    for recipe in [
        Recipe("single", "oracle", Single, Single.predict, one_rank=True),
        Recipe("naive-ddp", "data parallel", NaiveDDP, NaiveDDP.predict),
        Recipe(
            "parameter-server", "data parallel", ParameterServer, ParameterServer.predict,
            optimizer=lambda server, comm, lr: server.pull_after(adamw(server, comm, lr)),
        ),
        Recipe("ddp", "data parallel", DDP, DDP.predict),
        _zero(1),
        _zero(2),
        Recipe("zero-3", "ZeRO", ZeRO3, ZeRO3.predict),
        Recipe(
            "tensor", "tensor parallel", tensor_parallel, partial(_mesh_footprint, axis="tp"),
            everything, unfit=_heads_problem,
        ),
        Recipe(
            "sequence", "tensor parallel", partial(tensor_parallel, sequence=True),
            partial(_mesh_footprint, axis="tp", sequence=True), everything, unfit=_sequence_problem,
        ),
        Recipe(
            "context", "context parallel",
            lambda module, comm: DDP(context_parallel(module, comm), comm),
            _context_footprint, positions, unfit=_chunks_problem,
        ),
        Recipe(
            "pipeline", "pipeline", _pipeline, partial(_mesh_footprint, axis="pp"), everything,
            unfit=_stages_problem, step=_pipeline_step,
        ),
        Recipe(
            "three-d", "three dimensions", _three_d, _mesh_footprint, _replica_rows,
            unfit=_three_d_problem, step=_pipeline_step,
        ),
    ]
}  # fmt: skip


def recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises ValueError (listing the names) if there is none."""
    if name not in RECIPES:
        raise ValueError(f"no strategy {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
