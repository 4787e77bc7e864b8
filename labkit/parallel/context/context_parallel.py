"""Context parallelism: every rank holds the full model and a part of each sequence.

    tokens     the quick brown │ fox jumps over      one sequence of s tokens, on 2 ranks
    rank 0     the             │           over      chunks 0 and 3 of 4 (zigzag.py)
    rank 1         quick brown │ fox jumps           chunks 1 and 2

Embedding, norms, MLP and loss process each token independently, so a rank does 1/n of the work and
holds 1/n of the activations. Only attention needs other ranks' tokens, so its core is replaced:

    way="ring"      blocks of k and v circulate past the queries    ring_attention.py
    way="ulysses"   ranks swap tokens for heads and back            ulysses.py

    model = context_parallel(GPT(...), comm)        # edit first,
    model = DDP(model, comm)                        # then wrap: each rank's loss and gradients
    x, y = (sequence_shard(t, comm) for t in (x, y))        # are means over equally many tokens,
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()    # so their average is exact

On a mesh, create DDP, ZeroOptimizer or ZeRO3 over the combined data- and context-parallel ranks,
`mesh["dp", "cp"]`; a strategy over fewer ranks raises ValueError:

    ranks of Mesh(dp=2, cp=2)     averaged over mesh.dp      0, 2 │ 1, 3     0 and 1 diverge
                                  over mesh["dp", "cp"]      0, 1, 2, 3      correct

With dropout, seed each rank differently after building the model; "ring" has no attention dropout.

Sources: Liu et al., arXiv 2310.01889 (ring); Jacobs et al., arXiv 2309.14509 (Ulysses);
    Llama Team, arXiv 2407.21783, section 3.3.2 (the name and the zig-zag shards).
"""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from labkit.comm import Comm
from labkit.parallel.common.ownership import owner_of
from labkit.parallel.common.shards import CopiedMark
from labkit.parallel.context.ring_attention import RingAttention
from labkit.parallel.context.ulysses import Ulysses, check_heads
from labkit.parallel.context.zigzag import positions_of

Way = Literal["ring", "ulysses"]


def context_parallel(model: nn.Module, comm: Comm, *, way: Way = "ring") -> nn.Module:
    """Make `model` take this rank's `sequence_shard` of tokens [b, s/n], and attend to all tokens.

    Args:
        model: a plain GPT, edited in place: each `attn.core`, which must be causal, is replaced.
        comm: the ranks that share each sequence.
        way: "ring" needs s divisible by 2n; "ulysses" also needs n to divide both head counts.

    Returns the model with the same weights and names. `positions` defaults to this rank's
    positions. Raises ValueError if `attn.core` is missing or cannot be replaced, or if parameters
    belong to a strategy that does not span `comm`; in forward, if s is not divisible by 2n or
    exceeds the model's context."""
    comm = Comm.of(comm)
    if way not in ("ring", "ulysses"):
        raise ValueError(f'way={way!r}: choose "ring" or "ulysses"')
    attentions: list[Any] = [
        module for name, module in model.named_modules()
        if name.split(".")[-1] == "attn" and isinstance(getattr(module, "core", None), nn.Module)
    ]  # fmt: skip
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} has no module attn.core, which context parallelism replaces; "
            "use a model whose blocks have one, such as labkit.GPT"
        )
    if "positions" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__}.forward has no argument `positions`, the positions of a "
            "rank's tokens; edit the plain model first, then wrap it"
        )
    for name, parameter in model.named_parameters():  # SequenceParts checks later owners
        owner = owner_of(parameter)
        if owner is not None and not {*comm.ranks} <= {*owner.comm.ranks}:
            raise ValueError(
                f"{name} belongs to a {type(owner).__name__} over ranks {list(owner.comm.ranks)}, "
                f"not over all ranks that share a sequence, {list(comm.ranks)}; call "
                'context_parallel first, then create the strategy over mesh["dp", "cp"]'
            )
    cores = [_core_for(attention, comm, way) for attention in attentions]
    for attention, core in zip(attentions, cores, strict=True):
        attention.core = core
    for parameter in model.parameters():
        SequenceParts(comm).attach_to(parameter)
    model.register_forward_pre_hook(_FillPositions(model, comm), with_kwargs=True)
    return model


@dataclass(frozen=True)
class SequenceParts(CopiedMark):
    """Marks a parameter that each rank of `comm` applies to its own part of the sequences."""

    comm: Comm

    name = "_labkit_sequence"

    def __str__(self) -> str:
        return ""  # all ranks hold the same parameter

    def check(self, name: str, comm: Comm, averaged: bool) -> None:
        if averaged and not {*self.comm.ranks} <= {*comm.ranks}:
            raise ValueError(
                f"ranks {list(self.comm.ranks)} use {name} on parts of the same sequences "
                f"(context_parallel), but ranks {list(comm.ranks)} do not include all of them, so "
                "its replicas would diverge; pass the data-parallel and the context-parallel ranks "
                "together to the strategy: Mesh(dp=..., cp=..., tp=...), DDP(model, "
                'mesh["dp", "cp"])'
            )


def _core_for(attention: Any, comm: Comm, way: Way) -> nn.Module:
    core = attention.core
    if isinstance(core, (RingAttention, Ulysses)):
        raise ValueError("this model is already context-parallel; edit a model only once")
    if getattr(vars(core).get("forward"), "runs_again_in_backward", False):
        raise ValueError(
            "this model's attn.core is already recomputed in backward; call context_parallel "
            "first, then Recompute"
        )
    if way == "ulysses":
        heads, kv_heads = (
            part.weight.shape[0] // attention.head_width for part in (attention.q, attention.k)
        )
        check_heads(heads, kv_heads, comm.size)
        return Ulysses(core, comm)
    dropout = getattr(core, "dropout", 0.0)
    if (p := getattr(dropout, "p", dropout)) > 0:  # a module or a float
        raise ValueError(
            f'way="ring" supports no dropout in attention, but this model has p={p}; set '
            'block.attn.core.dropout = 0.0 in each block, or use way="ulysses"'
        )
    return RingAttention(comm)


class _FillPositions:
    """Forward pre-hook that passes `positions`; without it, each shard would begin at 0."""

    def __init__(self, model: nn.Module, comm: Comm):
        self.signature, self.comm = inspect.signature(model.forward), comm

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound, comm = self.signature.bind_partial(*args, **kwargs), self.comm
        tokens = next(iter(bound.arguments.values()), None)
        if tokens is None or bound.arguments.get("positions") is not None:
            return None
        length = tokens.shape[1] * comm.size
        context = getattr(model, "context", length)
        if length > context:
            raise ValueError(
                f"{comm.size} shards of {tokens.shape[1]} tokens make a sequence of {length}, "
                f"longer than the model's context of {context}; pass sequence_shard(tokens, comm) "
                "on each rank, not all tokens, or build the model with a larger context"
            )
        bound.arguments["positions"] = positions_of(length, comm, tokens.device)  # [s/n]
        return bound.args, bound.kwargs
