"""What tensor parallelism costs a rank, in bytes, told from the plain model and the tokens of a
batch: the sums of tensor.py's picture, and what embedding and head add to them.

Held: a cut parameter is 1/t, its vocabulary padded; the others are whole. Sent, of S bytes of x,
[b, s, w], in units of (t-1)/t S, which a gather or a scatter takes once and an all-reduce twice:

                     embedding     a layer     head     and of
    tensor           2             8           2        logits  1, where they are gathered
    with sequence    2             10          3        weights 2: 6 w a layer, 2 w of the last
                                                        norm, the table of positions
"""

from collections.abc import Iterable
from math import ceil
from typing import Any

from torch import Tensor, nn

from labkit.holdings import Footprint
from labkit.parallel.tensor.validation import columns_and_rows, is_attention, is_mlp


def footprint(
    module: Any, size: int, tokens: int, *, sequence: bool = False, gather_logits: bool = True
) -> Footprint:
    """Of one rank of `size`, in a step of AdamW on `tokens` (b s) of a plain `GPT`."""
    item_bytes = next(module.parameters()).element_size()
    by_rows, cut = _vocabularies(module), _cut(module)
    held = held_bytes(module, size)
    trained = [p for p in held if p.requires_grad]
    gradient_bytes = sum(held[p] for p in trained)

    layers = [one for one in module.modules() if is_attention(one)]
    width: int = module.embed.tokens.embedding_dim
    x_bytes = tokens * width * item_bytes
    units = 2 + 10 * len(layers) + 3 if sequence else 2 + 8 * len(layers) + 2
    sent_bytes = units * x_bytes
    if gather_logits:
        vocab: int = module.head.out_features
        sent_bytes += tokens * ceil(vocab / size) * size * item_bytes
    if sequence:
        partial = sum(p.nbytes for p in trained if p not in by_rows and p not in cut)
        sent_bytes += 2 * partial
    return Footprint(
        parameter_bytes=sum(held.values()),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=2 * gradient_bytes + 4 * len(trained),
        bus_bytes=(size - 1) / size * sent_bytes,
    )


def held_bytes(module: Any, size: int) -> dict[Tensor, int]:
    """What one rank of `size` has of each parameter of a plain model."""
    by_rows, cut = _vocabularies(module), _cut(module)
    return {
        p: ceil(p.shape[0] / size) * p[0].nbytes if p in by_rows
        else p.nbytes // size if p in cut
        else p.nbytes
        for p in module.parameters()
    }  # fmt: skip


def _vocabularies(module: nn.Module) -> set[Tensor]:
    every: Iterable[Any] = module.modules()
    tokens = [one.tokens.weight for one in every if hasattr(one, "tokens")]
    return {*tokens, *getattr(module, "head", nn.Module()).parameters()}


def _cut(module: nn.Module) -> set[Tensor]:
    """By columns, with their biases, and by rows, without."""
    found: set[Tensor] = set()
    every: Iterable[Any] = module.modules()
    for one in every:
        if is_attention(one) or is_mlp(one):
            columns, row = columns_and_rows(one)
            found.update(p for name in columns for p in getattr(one, name).parameters())
            found.add(getattr(one, row).weight)
    return found
