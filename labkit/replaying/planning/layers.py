"""One layer of a model at scale, recorded without data: operations, bytes sent, and memory.

Each of the three kinds of layers is recorded once per shape: labkit's code runs between a source of
the input and a sink for the output. A stage's operations, bytes sent and bytes kept are exact sums
over its layers. Parameters and gradients are bfloat16; the optimizer keeps an fp32 master copy and
AdamW's two moments. Dropout is 0.
"""

from collections.abc import Sequence
from contextlib import ExitStack
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
from labkit.parallel.common import ownership
from labkit.parallel.tensor.layers import vocab_parallel_cross_entropy
from labkit.parallel.tensor.tensor_parallel import tensor_parallel
from labkit.precision.master import MasterWeights
from labkit.replaying.dry_runs import dry_run
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.replays import events_of
from labkit.trace import RankTrace
from labkit.trace.recording import span

Kind = Literal["embedding", "block", "head"]
Bytes = tuple[int, ...]  # by category, in the order of labkit.trace.CATEGORIES
DTYPE = torch.bfloat16
ELEMENT_BYTES = 2
GRADIENT = "gradient"  # prefix of the span names that mark a completed gradient


class Shape(NamedTuple):
    """The inputs that determine a layer's recording; sizes are those of the unsharded layer."""

    kind: Kind
    width: int
    rows: int
    context: int
    tp: int = 1
    sequence: bool = False  # sequence parallelism
    heads: int = 1  # for a block
    recompute: str = "none"
    core: str = "fused"  # attention kernel; "plain" stores every score
    vocab: int = 1  # for an embedding or a head


@dataclass(frozen=True)
class LayerPass:
    """The forward or backward pass of one micro-batch through a layer, or its optimizer step."""

    # In time order: ("compute", Operation), ("issue" or "wait", CommEvent), and ("gradient",
    # elements) for a completed gradient.
    events: tuple[tuple[str, Any], ...]
    peak: Bytes  # peak, minus the bytes in use before the forward pass or the optimizer step

    def all_of(self, kind: str) -> list[Any]:
        return [record for kind_of, record in self.events if kind_of == kind]


@dataclass(frozen=True)
class Layer:
    """A recorded layer. `kept`: bytes (input included) kept from forward to backward."""

    forward: LayerPass
    backward: LayerPass
    kept: Bytes

    @cached_property
    def gradients(self) -> list[int]:
        """Elements per parameter on this rank, in the order in which gradients complete."""
        return self.backward.all_of("gradient")

    @cached_property
    def sent_bytes(self) -> int:
        """Bus bytes of rank 0 per micro-batch."""
        issued = [*self.forward.all_of("issue"), *self.backward.all_of("issue")]
        return sum(event.bus_bytes for event in issued)


def shape_of(kind: Kind, sizes: Sizes, layout: Layout, core: str = "fused") -> Shape:
    """The shape of a `kind` layer in `layout`, for one micro-batch."""
    sequence = layout.sequence and layout.tp > 1
    common = kind, sizes.width, layout.microbatch, sizes.context, layout.tp, sequence
    if kind == "block":
        return Shape(*common, sizes.heads, layout.recompute, core)
    return Shape(*common, vocab=sizes.vocab)


@lru_cache(maxsize=4096)
def recorded(shape: Shape) -> Layer:
    """Record a layer of this shape. Raises ValueError for sizes not divisible by tp."""
    return record_layers([shape])


def record_layers(shapes: Sequence[Shape]) -> Layer:
    """Record consecutive layers, such as a whole stage."""
    return _layer_of(dry_run(_micro_batch, shapes, ranks=shapes[0].tp).ranks[0])


def _micro_batch(shapes: Sequence[Shape]) -> None:
    """One rank's forward and backward pass. Gradients are preallocated, as in DDP's buckets."""
    stage = _Stage(shapes)
    for parameter in stage.layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.register_post_accumulate_grad_hook(_mark_complete)
    optimizer = torch.optim.SGD([stage.anchor], lr=0.0)
    optimizer.step()  # ends step 0, which built the model
    end = stage()
    end.backward(torch.empty_like(end))
    optimizer.step()


def _mark_complete(parameter: Tensor) -> None:
    with span(f"{GRADIENT} {parameter.numel()}"):  # an empty span as a marker
        pass


class _Stage(nn.Module):
    """Layers of a GPT between a source and a sink: one rank of a pipeline stage."""

    def __init__(self, shapes: Sequence[Shape]):
        super().__init__()
        kinds, model = {shape.kind for shape in shapes}, _model(shapes)
        self.first, self.vocab = shapes[0], shapes[-1].vocab
        self.layers = nn.ModuleDict()
        if "embedding" in kinds:
            self.layers["embed"] = model.embed
        if "head" in kinds:
            self.layers.update({"norm": model.norm, "head": model.head})
        self.layers["blocks"] = blocks = nn.ModuleList()
        edited: Any = zip(model.blocks, (shape for shape in shapes if shape.kind == "block"))
        for block, shape in edited:
            if shape.core == "plain":
                block.attn.core = PlainAttention()
            if shape.recompute == "full":
                Recompute(block, blocks=[block])
            blocks.append(block)
        self.anchor = nn.Parameter(torch.empty(0))  # makes the source's output require a gradient

    def forward(self) -> Any:
        first, layers = self.first, self.layers
        batch = first.rows, first.context
        if "embed" in layers:
            x = layers["embed"](torch.zeros(batch, dtype=torch.long))
        else:
            positions = first.context // (first.tp if first.sequence else 1)
            x = _Source.apply(self.anchor, first.rows, positions, first.width)
        for block in layers["blocks"].children():
            x = block(x)
        if "head" not in layers:
            return _Sink.apply(x)
        logits = layers["head"](layers["norm"](x))
        targets = torch.zeros(batch, dtype=torch.long)
        if first.tp > 1:
            return vocab_parallel_cross_entropy(logits, targets, Comm(), vocab=self.vocab)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _model(shapes: Sequence[Shape]) -> GPT:
    """An untied bfloat16 GPT with these layers, sharded over the ranks; extra layers are small."""
    first, depth = shapes[0], sum(shape.kind == "block" for shape in shapes)
    heads = max([first.tp, *(shape.heads for shape in shapes if shape.kind == "block")])
    vocab = max([first.tp, *(shape.vocab for shape in shapes)])
    default = torch.get_default_dtype()
    with ExitStack() as patches:  # parameters have no values: skip random init and broadcast
        for kind in (GPT, nn.Linear, nn.Embedding, nn.LayerNorm):
            patches.enter_context(patch.object(kind, "reset_parameters", lambda *_: None))
        patches.enter_context(patch.object(ownership, "broadcast_tensors", lambda *_: None))
        patches.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(DTYPE)
        model = GPT(vocab, first.width, max(depth, 1), heads, first.context, tied=False)
        if first.tp > 1:
            tensor_parallel(model, Comm(), sequence=first.sequence, gather_logits=False)
    return model


class _Source(torch.autograd.Function):
    """Creates an input [b, s, w] and drops its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * 4


class _Sink(torch.autograd.Function):
    """Consumes an output and creates its gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        return y.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].new_empty(ctx.shape)


def _layer_of(rank_trace: RankTrace) -> Layer:
    forward, backward = (
        next(x for x in rank_trace.spans if x.phase == phase and not x.depth)
        for phase in ("forward", "backward")
    )
    events = [x for x in events_of(rank_trace) if x[2] in ("compute", "issue", "wait")]
    for mark in rank_trace.spans:
        if mark.phase == "user" and mark.module.startswith(GRADIENT):
            events.append((mark.began_s, 0, "gradient", int(mark.module.split()[1])))
    events.sort(key=lambda x: x[:2])
    before = [x.held_bytes for x in rank_trace.memory if x.when_s < forward.began_s][-1]

    def pass_of(began_s: float, ended_s: float) -> tuple[LayerPass, Bytes]:
        held = [x.held_bytes for x in rank_trace.memory if began_s <= x.when_s <= ended_s]
        during = [x[2:] for x in events if began_s <= x[0] <= ended_s]
        return LayerPass(tuple(during), _above(max(held, key=sum), before)), held[-1]

    of_forward, at_end = pass_of(forward.began_s, backward.began_s)
    of_backward, _ = pass_of(backward.began_s, backward.ended_s)
    return Layer(of_forward, of_backward, _above(at_end, before))


def _above(held: Bytes, before: Bytes) -> Bytes:
    return tuple(now - then for now, then in zip(held, before, strict=True))


@lru_cache(maxsize=4096)
def recorded_update(parameters: tuple[int, ...]) -> LayerPass:
    """Record the second step of `MasterWeights` (AdamW) on parameters of these element counts."""
    rank_trace = dry_run(_updates, parameters, ranks=1).ranks[0]
    step = next(x for x in rank_trace.spans if x.phase == "optimizer" and not x.depth)
    held = [x.held_bytes for x in rank_trace.memory]
    during = [point.held_bytes for point in rank_trace.memory if point.when_s >= step.began_s]
    before = held[len(held) - len(during) - 1]
    events = tuple(("compute", operation) for operation in rank_trace.operations)
    return LayerPass(events, _above(max(during, key=sum, default=before), before))


def _updates(parameters: Sequence[int]) -> None:
    every = [nn.Parameter(torch.empty(numel, dtype=DTYPE)) for numel in parameters]
    for parameter in every:
        parameter.grad = torch.empty_like(parameter)
    optimizer = MasterWeights(every, torch.optim.AdamW)
    for _ in range(2):
        optimizer.step()
