"""Tensor parallelism: the matrices of every layer are sharded; all ranks process the same tokens.

    x ─▶ norm ─ f ─▶ q k v ─▶ some heads ─▶ out ─ g ─▶ + ─▶ norm ─ f ─▶ up ─▶ gelu ─▶ down ─ g ─▶ +
                     columns                rows                        columns       rows
    full             ├──────── 1/t ───────────┤  full                   ├─────── 1/t ─────┤  full

    each rank holds   1/t of the matrices and activations between them; all of x, norms, row biases
    traffic           f all-reduces in backward, g in forward: four all-reduces of b s w elements
                      per layer, 8(t-1)/t b s w sent per rank (bus bytes)
    saved             s b w (10 + 24/t + 5 h s / (w t)) bytes per layer in 2-byte types

Sequence parallelism (`sequence=True`) also shards x, so that no activation is replicated:

    x [b, s/t, w] ─▶ norm ─ all-gather ─▶ q k v ... out ─ reduce-scatter ─▶ + ─▶ norm ─ ...

    traffic           f: all-gather forward, reduce-scatter backward; g: the reverse; x is gathered
                      again in backward before q k v and up: 10(t-1)/t b s w. Norms and row biases
                      see shards: four all-reduces of gradients, 6 w elements per layer
    saved             s b w (34 + 5 h s / w) / t bytes per layer

Full recompute repeats forward's collectives (a layer's last collective only if dropout follows).

    dropout mask                      rank 0     rank 1     random numbers are
    of a replica [b, s, w]            1 0 1 1    1 0 1 1    the same, so replicas stay equal
    of a shard: heads or positions    1 0 1 1    0 1 1 0    different on each rank

Legend: b rows, s positions, w width, h heads, t ranks.
Sources: Shoeybi et al., arXiv 1909.08053, section 3, appendix B.2 (the second generator);
Korthikanti et al., 2205.05198, section 4; one node per group: Narayanan et al., 2104.04473.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

import labkit.parallel.common.ownership as ownership
from labkit.comm import Comm
from labkit.dispatch import generators, no_modes
from labkit.parallel.tensor import layers, validation


def tensor_parallel(
    model: nn.Module, comm: Comm, *, sequence: bool = False, gather_logits: bool = True
) -> nn.Module:
    """Shard `model` over the ranks of `comm` in place and return it. Its parameters are new: create
    the optimizer and wrap the model in DDP or ZeRO afterward.

    Args:
        model: receives rank 0's weights. Layers are found by name: attention (`q`, `k`, `v`, `out`
            and `head_width`), MLPs (`up`, `down` and, if gated, `gate`), the embedding (`tokens`
            and, if any, `positions`) and the `head`.
        comm: the ranks that share the model, such as `mesh.tp`. These ranks need the same batch
            and seed, so that dropout is equal on replicas and differs between shards.
        sequence: also shard the activations between `tokens` and `head` along the sequence, dim 1.
        gather_logits: whether every rank gets all logits, or only those of its vocabulary shard.

    Raises ValueError if heads or widths are not divisible by t, if a layer is already sharded, has
    unknown parameters or computes wrong values on a slice of its features (as a fused gate does),
    if a tie would be broken or there is nothing to shard; in forward, if s is not divisible by t
    or, in a `World` with checks, inputs differ between ranks."""
    comm = Comm.of(comm)
    trials = validation.split_trials(model, comm)
    ownership.check_same_on_all_ranks(list(model.named_parameters()), comm, averaged=False)
    ownership.broadcast_tensors([*model.parameters(), *model.buffers()], comm)
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for trial in trials:
        _shard_layer(trial, comm, sequence)
    sharded = [*(x.layer for x in trials), *_shard_vocabulary(model, comm, sequence, gather_logits)]
    has_ends = {layers.VocabParallelEmbedding, layers.VocabParallelHead} <= {*map(type, sharded)}
    validation.check_edited(model, before, lacks_ends=sequence and comm.size > 1 and not has_ends)
    if sequence:
        _edit_for_sequence(model, comm, {part for layer in sharded for part in layer.modules()})
    check = partial(validation.check_same_input, comm, sequence)
    model.register_forward_pre_hook(check, with_kwargs=True)
    return model


def _shard_layer(trial: validation.SplitTrial, comm: Comm, sequence: bool) -> None:
    """Replaces the layer's linears. Builds all shards first, so that an error changes nothing."""
    layer, options = trial.layer, dict[str, Any](comm=comm, sequence=sequence)
    linears = [getattr(layer, name) for name in trial.columns]
    columns = [layers.ColumnParallelLinear.from_linear(linear, **options) for linear in linears]
    row = layers.RowParallelLinear.from_linear(getattr(layer, trial.row), **options)
    for name, part in zip(trial.names, (*columns, row), strict=True):
        setattr(layer, name, part)
    if trial.pending:
        layer.forward = trial
    # With a sharded sequence, all dropout in the layer applies to shards.
    layer.forward = ShardedForward(layer, comm, columns, None if sequence else row)


def _shard_vocabulary(model: Any, comm: Comm, sequence: bool, gather_logits: bool) -> list[Any]:
    """Shards the embedding and the head by vocabulary; tied weights remain one parameter."""
    ends: list[Any] = []
    rows: dict[Tensor, nn.Parameter] = {}
    for module in list(model.modules()):
        if isinstance(whole := getattr(module, "tokens", None), nn.Embedding):
            part = layers.VocabParallelEmbedding.from_embedding(whole, comm, sequence=sequence)
            module.tokens, rows[whole.weight] = part, part.weight
            ends.append(part)
    for module in list(model.modules()):
        whole = getattr(module, "head", None)
        if isinstance(whole, nn.Linear) and (module is model or whole.weight in rows):
            module.head = layers.VocabParallelHead.from_linear(
                whole, comm, sequence=sequence, gather_output=gather_logits
            )
            module.head.weight = rows.get(whole.weight, module.head.weight)
            ends.append(module.head)
    return ends


@contextmanager
def per_rank_rng(comm: Comm) -> Iterator[None]:
    """In this block, each rank has its own random stream; afterward, the shared stream resumes."""
    if comm.size == 1:
        yield
        return
    with no_modes():  # the seed has a value even in a dry run
        seed = int(torch.randint(2**62, ())) + comm.rank
    with torch.random.fork_rng(range(len(generators()) - 1)):
        for generator in generators():
            generator.manual_seed(seed)
        yield


class ShardedForward:
    """Replaces `module.forward`: each rank draws its own dropout masks (only up to the `row`
    layer, if given). The first of several column layers, such as q, computes the outputs of all of
    them, so that x is gathered once and its gradient reduced once."""

    def __init__(self, module: nn.Module, comm: Comm, columns: Sequence[Any] = (), row: Any = None):
        self.module, self.forward, self.comm = module, module.forward, comm
        self.columns, self._begins_at_once = list(columns), row is None
        self._own: Any = None  # the `per_rank_rng` context, once entered
        self._call: Any = None  # during forward: x, its state, the outputs not yet returned
        for column in columns:
            column.shared_input = self
        if row is not None:
            row.register_forward_pre_hook(self._end)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = self._own, self._call
        self._own, self._call = None, (None, None, {})
        try:
            if self._begins_at_once:
                self._begin()
            return self.forward(*args, **kwargs)
        finally:
            self._end()
            self._own, self._call = outer

    def output_of(self, column: layers.ColumnParallelLinear, x: Tensor) -> Tensor:
        """The output of `column`; a call from outside the layer computes this output only."""
        if self._call is None:
            if ownership.running_backward() is None:
                return layers.columns([column], x)[0]
            # Recomputing part of forward may rerun some linears without the row layer.
            self._call = None, None, {}
            ownership.at_end_of_backward(self._forget)
        self._begin()
        last_x, last_state, ys = self._call
        state = torch.is_grad_enabled(), x.is_inference() or x._version
        if x is not last_x or state != last_state or column not in ys:
            ys = dict(zip(self.columns, layers.columns(self.columns, x), strict=True))
        y = ys.pop(column)
        self._call = (x, state, ys) if ys else (None, None, {})
        return y

    def _begin(self) -> None:
        if self._own is None and validation.has_dropout(self.module):
            own = per_rank_rng(self.comm)
            own.__enter__()
            self._own = own

    def _end(self, *_: Any) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.__exit__(None, None, None)

    def _forget(self) -> None:
        self._call = None
        with torch.random.fork_rng(range(len(generators()) - 1)):
            self._end()  # restores an old state, which fork_rng undoes


def _edit_for_sequence(model: Any, comm: Comm, sharded: set[nn.Module]) -> None:
    """Edits modules outside `sharded` for sequence shards x [b, s/t, w]."""
    for module in (module for module in model.modules() if module not in sharded):
        if isinstance(module, _DropoutNd):
            module.forward = ShardedForward(module, comm)
        elif module._parameters or isinstance(module, nn.Embedding):
            module.forward = layers.SummedGradients(module, comm)
