"""A model that is cut by hand over tensor-parallel ranks, for what must work with any such model.

Every parameter has the name that it has whole; those that are cut have a mark (common/shards.py):

    rows.weight    [5, 6]     rows, with padding, and tied to the head: `cuts.weight`
    up.weight      [12, 6]    rows (column-parallel: the output's columns)       up.bias [12] too
    down.weight    [6, 12]    columns (row-parallel)
    norm, down.bias           whole on every rank
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit import DDP, Comm, MasterWeights, Mesh, NaiveDDP, ZeRO3, ZeroOptimizer
from labkit.parallel.common.conjugate import copy_to_ranks, gather_from_ranks, reduce_from_ranks
from labkit.parallel.common.shards import Shard, mark_shard, shard_of
from labkit.parallel.pipeline.pipeline import Pipeline

VOCAB, WIDTH, HIDDEN = 5, 6, 12  # 5 rows on 4 ranks: 2, 2, 1 and none


class Part(nn.Module):
    comm: Comm | None = None

    def f(self, x: Tensor) -> Tensor:
        return x if self.comm is None else copy_to_ranks(x, self.comm)

    def g(self, x: Tensor) -> Tensor:
        return x if self.comm is None else reduce_from_ranks(x, self.comm)


class Rows(Part, nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        n = -(-VOCAB // self.comm.size) if self.comm else VOCAB
        here = tokens - (n * self.comm.rank if self.comm else 0)
        is_here = (here >= 0) & (here < n)
        return self.g(F.embedding(here.clamp(0, n - 1), self.weight) * is_here.unsqueeze(-1))


class Columns(Part, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.f(x), self.weight, self.bias)


class Down(Part, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.g(F.linear(x, self.weight)) + self.bias


class Model(nn.Module):
    """tokens [b] -> logits [b, VOCAB]"""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm = Rows(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = Columns(WIDTH, HIDDEN), Down(HIDDEN, WIDTH)
        self.cuts = Columns(WIDTH, VOCAB, bias=False)
        self.cuts.weight = self.rows.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rows(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        logits = self.cuts(x)
        if self.cuts.comm is not None:
            logits = gather_from_ranks(logits, self.cuts.comm, dim=-1)
        return logits[..., :VOCAB]


def fresh(seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(seed)
    return Model().to(dtype)


def cut(model: Model, comm: Comm) -> Model:
    """Each rank's part of the model, in place."""
    for part in (model.rows, model.up, model.down, model.cuts):
        part.comm = comm
    tied = cut_along(model.rows.weight, 0, comm)
    model.rows.weight = model.cuts.weight = tied
    model.up.weight = cut_along(model.up.weight, 0, comm)
    model.down.weight = cut_along(model.down.weight, 1, comm)
    model.up.bias = cut_along(model.up.bias, 0, comm)
    return model


def cut_along(parameter: Tensor, dim: int, comm: Comm) -> nn.Parameter:
    whole = parameter.shape[dim]
    n = -(-whole // comm.size)
    start, stop = (min(k * n, whole) for k in (comm.rank, comm.rank + 1))
    here = parameter.detach().narrow(dim, start, stop - start)
    padding = [size if d != dim else n - size for d, size in enumerate(here.shape)]
    part = nn.Parameter(torch.cat([here, here.new_zeros(padding)], dim))
    mark_shard(part, Shard(comm, dim, start, stop, whole))
    return part


def whole_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights, on every rank, of a model under any strategy."""
    module = getattr(model, "module", model)
    marks = {name: shard_of(p) for name, p in module.named_parameters(remove_duplicate=False)}
    state = model.full_state_dict() if isinstance(model, ZeRO3) else module.state_dict()
    return {name: joined(x, marks.get(name)) for name, x in state.items()}


def joined(x: Tensor, shard: Shard | None) -> Tensor:
    if shard is None:
        return x.detach().clone()
    parts = [torch.empty_like(x) for _ in range(shard.comm.size)]
    shard.comm.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts, shard.dim).narrow(shard.dim, 0, shard.whole)


def wrapped(strategy: str, module: nn.Module, comm: Comm | None = None, **zero_3: Any) -> Any:
    """The module under a data-parallel strategy; `zero_3`: options for ZeRO3."""
    wraps: dict[str, Any] = {"naive-ddp": NaiveDDP, "ddp": DDP, "masters": DDP, "zero-3": ZeRO3}
    if strategy in ("plain", "zero-1", "zero-2"):
        return module
    return wraps[strategy](module, comm=comm, **(zero_3 if strategy == "zero-3" else {}))


def optimizer_of(strategy: str, params: Any, make: Any, comm: Comm, bucket_mb: float) -> Any:
    """`make` is a partial of a torch optimizer."""
    if strategy in ("zero-1", "zero-2"):
        stage = int(strategy[-1])
        return ZeroOptimizer(params, make.func, stage, comm, bucket_mb=bucket_mb, **make.keywords)
    if strategy == "masters":
        return MasterWeights(params, make.func, **make.keywords)
    return make(params)


def under(strategy: str, module: nn.Module, comm: Comm, make: Any) -> tuple[nn.Module, Any]:
    model = wrapped(strategy, module, comm, persist_below=10)
    return model, optimizer_of(strategy, model.parameters(), make, comm, 0.0005)


NAMES = ("plain", "ddp", "zero-1", "zero-2", "zero-3", "masters")
STRATEGIES = {name: partial(under, name) for name in NAMES}
ADAM = partial(torch.optim.AdamW, lr=1e-2)


def loss_of(model: nn.Module, step: int, dp: Comm | None) -> Tensor:
    """The mean over this rank's rows of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, VOCAB, (2, 12), generator=generator)
    if dp is not None:
        tokens, targets = (x.chunk(dp.size)[dp.rank] for x in (tokens, targets))
    return F.cross_entropy(model(tokens), targets)


def train(
    model: nn.Module, optimizer: Any, dp: Comm | None, steps: range, loss_of: Any = loss_of
) -> list[float]:
    """The global losses of some steps, on the ranks that have them: `loss_of(model, step, dp)`. A
    step's batch is the same in any layout."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, dp)
        if not isinstance(model, Pipeline):  # whose step goes backward, too
            loss.backward()
        optimizer.step()
        if loss is not None:
            total = loss.detach().double().reshape(1).clone()
            if dp is not None:
                dp.all_reduce(total, "mean")
            losses.append(total.item())
    return losses


def built(
    strategy: str, mesh: Mesh, make: Any = ADAM, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, Any]:
    """A cut model under a strategy, and its optimizer; `make` is a partial of a torch optimizer."""
    return STRATEGIES[strategy](cut(fresh(seed, dtype), mesh.tp), mesh.dp, make)


def alone(make: Any = ADAM, seed: int = 0) -> tuple[Model, torch.optim.Optimizer]:
    model = fresh(seed)
    return model, make(model.parameters())
