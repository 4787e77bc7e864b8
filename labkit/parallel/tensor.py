"""Tensor parallelism: every layer of a model is cut, and all ranks compute on the same tokens.

    x ─▶ norm ─ f ─▶ q k v ─▶ some heads ─▶ out ─ g ─▶ + ─▶ norm ─ f ─▶ up ─▶ gelu ─▶ down ─ g ─▶ +
                     columns                rows                        columns       rows
    whole            ├──────── 1/t ───────────┤  whole                  ├─────── 1/t ─────┤  whole

    each rank holds   1/t of the matrices and of what is computed between them; whole norms,
                      biases of `out` and `down`, and all of x
    travels           f all-reduces in backward, g in forward: four all-reduces of b s w elements
                      a layer, 8(t-1)/t b s w from each rank (bus bytes)
    kept              s b w (10 + 24/t + 5 h s / (w t)) bytes a layer in 2-byte types

Sequence parallelism (`sequence=True`) cuts x, too, so that nothing is held t times:

    x [b, s/t, w] ─▶ norm ─ all-gather ─▶ q k v ... out ─ reduce-scatter ─▶ + ─▶ norm ─ ...

    travels           f becomes all-gather forward and reduce-scatter backward, g the other way
                      round: the same bytes. As the part of x is kept, not the whole, backward
                      gathers it again before q k v and up: 10(t-1)/t b s w in all.
                      Norms and biases see a part of the sequence: their gradients are summed,
                      6 w elements a layer in four small all-reduces.
    kept              s b w (34 + 5 h s / w) / t bytes a layer

Full recompute (labkit.Recompute) adds the collectives of the forward that it runs again.

    conjugate.py      f, g and their kind           random_state.py   dropout that agrees or differs
    tensor_linear.py  the two ways to cut           tensor_checks.py  what is said of bad input

Legend: b rows, s positions, w width, h heads, t ranks.
Sources: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; Korthikanti et al., arXiv
2205.05198, section 4. Ranks of one group belong inside a node: Narayanan et al., arXiv 2104.04473.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from labkit.comm import Comm
from labkit.parallel.parts.agreement import check_same_on_all_ranks
from labkit.parallel.parts.conjugate import copies_to_ranks, gather_from_ranks, scatter_to_ranks
from labkit.parallel.parts.random_state import DrawsItsOwn
from labkit.parallel.parts.replicas import copy_from_rank_0
from labkit.parallel.parts.tensor_checks import SameInput, check_fits, is_attention, is_mlp
from labkit.parallel.tensor_linear import ColumnParallelLinear, OneInput, RowParallelLinear


def tensor_parallel(
    model: nn.Module, comm: Comm, *, sequence: bool = False, gather_logits: bool = True
) -> nn.Module:
    """Cut `model` over the ranks of `comm`, in place, and return it.

    Args:
        model: it starts as rank 0's. Found by name: attention, which is a module with `q`, `k`,
            `v`, `out` and `head_width`; an MLP, one with `up` and `down`; the embedding, one with
            `tokens`, and `positions` if it has any; the `head`. All else stays whole.
        comm: the ranks that share it, as `mesh.tp`. All of them get the same batch, and the same
            seed: then replicas drop the same elements, and parts do not.
        sequence: cut what is between these layers along the sequence, dim 1.
        gather_logits: every rank gets all logits; False: those of its part of the vocabulary.

    Edit a model first, then make its optimizer and wrap it in DDP or ZeRO: its parameters are new.
    With one rank it computes what it did. A `World` that checks compares the ranks' inputs.

    Raises ValueError where heads or widths do not divide over the ranks, naming the sizes that
    would; where nothing is found to cut, or a layer was cut before; and in forward where a sequence
    does not divide, or the ranks' inputs differ.
    """
    check_fits(model, comm)
    check_same_on_all_ranks(list(model.named_parameters()), comm)
    copy_from_rank_0([*model.parameters(), *model.buffers()], comm)
    layers = [one for one in model.modules() if is_attention(one) or is_mlp(one)]
    for layer in layers:
        _cut_layer(layer, comm, sequence)
    if sequence:
        _cut_sequence(model, comm, {one for layer in layers for one in layer.modules()})
    model.register_forward_pre_hook(SameInput(comm, sequence), with_kwargs=True)
    return model


def _cut_layer(layer: nn.Module, comm: Comm, sequence: bool) -> None:
    """Columns, then rows. What is drawn between the two is drawn for this rank's part."""
    first, last = (["q", "k", "v"], "out") if is_attention(layer) else (["up"], "down")
    columns = [
        ColumnParallelLinear.from_linear(getattr(layer, name), comm, sequence=sequence)
        for name in first
    ]
    for name, column in zip(first, columns, strict=True):
        setattr(layer, name, column)
    if len(columns) > 1:
        OneInput(columns)
    row = RowParallelLinear.from_linear(getattr(layer, last), comm, sequence=sequence)
    setattr(layer, last, row)
    layer.forward = DrawsItsOwn(layer, comm)


# ---- sequence parallelism: the rest of the model, on a part of the sequence


def _cut_sequence(model: Any, comm: Comm, whole: set[nn.Module]) -> None:
    """From the embedding to the head, x is [b, s/t, w], but for the modules `whole`."""
    for module in list(model.modules()):
        if isinstance(getattr(module, "tokens", None), nn.Module):
            module.tokens.forward = _ThenScatter(module.tokens, comm)
            whole.add(module.tokens)
            if hasattr(module, "positions"):
                module.positions.forward = _OwnPositions(module.positions, comm)
                whole.add(module.positions)
    if hasattr(model, "head"):
        model.head.forward = _GatherFirst(model.head, comm)
        whole.add(model.head)
    for module in model.modules():
        if module in whole:
            continue
        if isinstance(module, _DropoutNd):
            module.forward = DrawsItsOwn(module, comm)
        elif module._parameters:
            module.forward = SummedGradients(module, comm)


class _Edit:
    """Takes the place of `module.forward`."""

    def __init__(self, module: nn.Module, comm: Comm):
        self.module, self.forward, self.comm = module, module.forward, comm


class SummedGradients(_Edit):
    """A module that sees a part of the sequence, as a norm does: the gradients of its own
    parameters are parts as well, and backward sums them over the ranks, in one all-reduce."""

    def __call__(self, *args: Any) -> Any:
        whole: Any = self.module._parameters
        there = {name: p for name, p in whole.items() if p is not None}
        shared: Any = copies_to_ranks([*there.values()], self.comm)
        self.module._parameters = {**whole, **dict(zip(there, shared, strict=True))}
        try:
            return self.forward(*args)
        finally:
            self.module._parameters = whole


class _OwnPositions(SummedGradients):
    """The table of positions: [s] -> the vectors of the own part, [s/t, w]."""

    def __call__(self, positions: Tensor) -> Any:
        return super().__call__(scatter_to_ranks(positions, self.comm, dim=-1))


class _ThenScatter(_Edit):
    """The tokens' vectors [b, s, w], the same on all ranks -> those of the own part."""

    def __call__(self, tokens: Tensor) -> Tensor:
        return scatter_to_ranks(self.forward(tokens), self.comm, dim=1)


class _GatherFirst(_Edit):
    """The head: all ranks have all of x before it."""

    def __call__(self, x: Tensor) -> Any:
        return self.forward(gather_from_ranks(x, self.comm, dim=1))
