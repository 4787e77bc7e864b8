"""One layer of a model at scale, recorded without data: what it computes, sends and keeps.

    source ─▶ [ embedding │ block │ norm, head, loss ] ─▶ sink     one micro-batch, rank 0 of tp

A model of a trillion parameters has three kinds of layers. Each is recorded once, through labkit's
own code (GPT's parts, `tensor_parallel`, `Recompute`, and `MasterWeights` for the optimizer's step
on it), between a source that makes its input and a sink that takes its output. So what a stage
computes, sends and keeps is the sum over its layers, to the byte. Recordings are cached; how long
they take on a cluster is in `stages.py`.

Parameters and gradients are bfloat16, 2 + 2 bytes; the optimizer keeps 12: an fp32 master copy and
two moments of AdamW. Dropout is 0.

Legend: b rows of a micro-batch, s positions, w width, t ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.comm import Comm
from labkit.memory.edits import Recompute
from labkit.models.attention import PlainAttention
from labkit.models.gpt import GPT
from labkit.parallel.tensor import tensor_parallel as tensor
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.parallel.tensor.vocab import vocab_parallel_cross_entropy
from labkit.precision import MasterWeights
from labkit.replaying.dry_runs import dry_run
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.programs import events_of
from labkit.trace import Operation, RankTrace
from labkit.trace.recording import span

Kind = Literal["embedding", "block", "head"]
Bytes = tuple[int, ...]  # by category, as labkit.trace.CATEGORIES
DTYPE = torch.bfloat16
ELEMENT_BYTES = 2
GRADIENT = "gradient"  # the name of a span that marks a complete gradient


class Shape(NamedTuple):
    """All that the recording of a layer depends on; sizes are those of the whole layer."""

    kind: Kind
    width: int
    rows: int
    context: int
    tp: int = 1
    sequence: bool = False  # parallelism
    heads: int = 1  # of a block
    recompute: str = "none"
    core: str = "fused"  # attention; "plain" stores every score
    vocab: int = 1  # of an embedding or a head


class LayerEvent(NamedTuple):
    """What a rank does next: "compute" an Operation, "issue" a CommEvent or "wait" for it, or
    "gradient": the gradient of a parameter of so many elements is complete."""

    kind: str
    what: Any


@dataclass(frozen=True)
class LayerPass:
    """The forward or the backward of one micro-batch. `peak`: the most it holds above what was held
    before the forward."""

    events: tuple[LayerEvent, ...]
    peak: Bytes

    def all_of(self, kind: str) -> list[Any]:
        return [event.what for event in self.events if event.kind == kind]


@dataclass(frozen=True)
class Layer:
    """A recorded layer. `kept`: bytes between forward and backward of a micro-batch, with its input
    and without its output."""

    forward: LayerPass
    backward: LayerPass
    kept: Bytes

    @cached_property
    def gradients(self) -> list[int]:
        """Elements of each parameter on this rank, in the order in which gradients complete."""
        return self.backward.all_of("gradient")

    @cached_property
    def sent_bytes(self) -> int:
        """Bus bytes of rank 0, for one micro-batch."""
        issued = [*self.forward.all_of("issue"), *self.backward.all_of("issue")]
        return sum(event.bus_bytes for event in issued)


def shape_of(kind: Kind, sizes: Sizes, layout: Layout, core: str = "fused") -> Shape:
    """What to record for a layer of this kind."""
    sequence = layout.sequence and layout.tp > 1
    common = kind, sizes.width, layout.microbatch, sizes.context, layout.tp, sequence
    if kind == "block":
        return Shape(*common, sizes.heads, layout.recompute, core)
    return Shape(*common, vocab=sizes.vocab)


@lru_cache(maxsize=4096)
def recorded(shape: Shape) -> Layer:
    """The layer of this shape. Raises ValueError for sizes that do not divide, as
    `tensor_parallel` does."""
    return record_layers([shape])


def record_layers(shapes: Sequence[Shape]) -> Layer:
    """These layers one after the other in one recording: a whole stage."""
    trace = dry_run(_micro_batch, shapes, ranks=shapes[0].tp)
    return _layer_of(trace.ranks[0])


def _micro_batch(shapes: Sequence[Shape]) -> None:
    """Forward and backward on a rank. Gradients exist from the start, as in DDP's buckets; an empty
    span marks each one that is complete."""
    stage = _Stage(shapes)
    for parameter in stage.layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.register_post_accumulate_grad_hook(_mark_complete)
    optimizer = torch.optim.SGD([stage.anchor], lr=0.0)
    optimizer.step()  # ends step 0, in which the model was built
    end = stage()
    end.backward(torch.empty_like(end))
    optimizer.step()


def _mark_complete(parameter: Tensor) -> None:
    with span(f"{GRADIENT} {parameter.numel()}"):
        pass


class _Stage(nn.Module):
    """Layers of a GPT between a source and a sink, as a rank of a pipeline has them."""

    def __init__(self, shapes: Sequence[Shape]):
        super().__init__()
        self.first = shapes[0]
        model = _model(shapes)
        blocks = iter(model.blocks)
        self.layers = nn.ModuleList()
        for shape in shapes:
            if shape.kind == "embedding":
                self.layers.append(_Embedding(model.embed, shape))
            elif shape.kind == "block":
                self.layers.append(_edited(next(blocks), shape))
            else:
                self.layers.append(_Head(model.norm, model.head, shape))
        self.anchor = nn.Parameter(torch.empty(0))  # gives the source's output a gradient

    def forward(self) -> Tensor:
        rows, positions = self.first.rows, self.first.context
        if self.first.sequence:
            positions //= self.first.tp
        x: Any = None
        if self.first.kind != "embedding":
            x = _Source.apply(self.anchor, rows, positions, self.first.width)
        for layer in self.layers:
            x = layer(x)
        return x if x.ndim == 0 else _Sink.apply(x)


def _model(shapes: Sequence[Shape]) -> GPT:
    """A GPT that has these layers, in bfloat16 and sharded over the ranks. All other layers are
    small. (A tied head is recorded untied.)"""
    first, depth = shapes[0], sum(shape.kind == "block" for shape in shapes)
    heads = max([first.tp, *(shape.heads for shape in shapes if shape.kind == "block")])
    vocab = max([first.tp, *(shape.vocab for shape in shapes)])
    with _uninitialised():
        model = GPT(vocab, first.width, max(depth, 1), heads, first.context, tied=False)
        if first.tp > 1:
            tensor_parallel(model, Comm(), sequence=first.sequence, gather_logits=False)
    return model


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Models are built in bfloat16; their parameters have no values, so none are drawn, and none
    copied from rank 0."""
    default = torch.get_default_dtype()
    with ExitStack() as patches:
        for kind in (GPT, nn.Linear, nn.Embedding, nn.LayerNorm):
            patches.enter_context(patch.object(kind, "reset_parameters", _do_nothing))
        patches.enter_context(patch.object(tensor, "broadcast_tensors", _do_nothing))
        patches.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(DTYPE)
        yield


def _do_nothing(*_: Any) -> None:
    pass


def _edited(block: Any, shape: Shape) -> nn.Module:
    if shape.core == "plain":
        block.attn.core = PlainAttention()
    if shape.recompute == "full":
        Recompute(block, blocks=[block])
    return block


class _Source(torch.autograd.Function):
    """Makes an input [b, s, w]; its gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * 4


class _Sink(torch.autograd.Function):
    """Takes an output, and makes its gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        return y.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].new_empty(ctx.shape)


class _Embedding(nn.Module):
    """None -> [b, s, w], of a batch of tokens."""

    def __init__(self, embed: nn.Module, shape: Shape):
        super().__init__()
        self.embed, self._batch = embed, (shape.rows, shape.context)

    def forward(self, nothing: None) -> Any:
        return self.embed(torch.zeros(self._batch, dtype=torch.long))


class _Head(nn.Module):
    """[b, s, w] -> the loss."""

    def __init__(self, norm: nn.Module, head: nn.Module, shape: Shape):
        super().__init__()
        self.norm, self.head = norm, head
        self._batch, self._vocab = (shape.rows, shape.context), shape.vocab
        self._vocab_parallel = shape.tp > 1

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        targets = torch.zeros(self._batch, dtype=torch.long)
        if self._vocab_parallel:
            return vocab_parallel_cross_entropy(logits, targets, Comm(), vocab=self._vocab)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _layer_of(one: RankTrace) -> Layer:
    """The two passes of a recording."""
    forward, backward = (
        next(x for x in one.spans if x.phase == phase and not x.depth)
        for phase in ("forward", "backward")
    )
    events = [x for x in events_of(one) if x[2] in ("compute", "issue", "wait")]
    for mark in one.spans:
        if mark.phase == "user" and mark.module.startswith(GRADIENT):
            events.append((mark.began_s, 0, "gradient", int(mark.module.split()[1])))
    events.sort(key=lambda x: x[:2])
    before = [x.held_bytes for x in one.memory if x.when_s < forward.began_s][-1]
    passes, held = [], []
    for began_s, ended_s in (
        (forward.began_s, backward.began_s),
        (backward.began_s, backward.ended_s),
    ):
        held.append([x.held_bytes for x in one.memory if began_s <= x.when_s <= ended_s])
        during = tuple(
            LayerEvent(kind, what)
            for when_s, _, kind, what in events
            if began_s <= when_s <= ended_s
        )
        passes.append(LayerPass(during, _above(max(held[-1], key=sum), before)))
    return Layer(passes[0], passes[1], _above(held[0][-1], before))


def _above(held: Bytes, before: Bytes) -> Bytes:
    return tuple(now - then for now, then in zip(held, before, strict=True))


class Update(NamedTuple):
    """The optimizer's step on some parameters; `peak` as in a LayerPass."""

    operations: tuple[Operation, ...]
    peak: Bytes


@lru_cache(maxsize=4096)
def recorded_update(parameters: tuple[int, ...]) -> Update:
    """`MasterWeights` of AdamW on parameters of so many elements each: its second step."""
    one = dry_run(_updates, parameters, ranks=1).ranks[0]
    step = next(x for x in one.spans if x.phase == "optimizer" and not x.depth)
    held = [x.held_bytes for x in one.memory]
    during = [point.held_bytes for point in one.memory if point.when_s >= step.began_s]
    before = held[len(held) - len(during) - 1]
    return Update(tuple(one.operations), _above(max(during, key=sum, default=before), before))


def _updates(parameters: Sequence[int]) -> None:
    every = [nn.Parameter(torch.empty(numel, dtype=DTYPE)) for numel in parameters]
    for parameter in every:
        parameter.grad = torch.empty_like(parameter)
    optimizer = MasterWeights(every, torch.optim.AdamW)
    for _ in range(2):
        optimizer.step()
