"""A recorded run made by hand: what DDP training of a small GPT leaves in a trace.

    step    | deal the batch | forward | backward                          | optimizer |
    comms    [send/recv]                     [bucket 0][bucket 1][bucket 2]
                                                                   [ wait ]

No clock, no chance: the same call gives the same trace, to the last bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from labkit.events import CommEvent, all_reduce_bus_bytes, chunk_sizes
from labkit.trace import MemoryPoint, RankTrace, Span, Step, Trace

WIDTH, DEPTH, VOCAB, CONTEXT, ROWS = 64, 2, 256, 32, 4  # of the GPT and its batch on a rank
TOKENS = ROWS * CONTEXT
OPTIMIZER_S, DEAL_S, LATENCY_S = 400e-6, 150e-6, 50e-6
BYTES_PER_S = 4e8  # of the wire
DETAIL_SLOWER = 3.0  # counting operations takes time


@dataclass
class Module:
    """A module of the GPT: `params` and `flops` (of forward) are its own, without its parts."""

    path: str
    kind: str
    params: int = 0
    flops: int = 0
    parts: list["Module"] = field(default_factory=list)

    @property
    def own_s(self) -> float:
        return 20e-6 + self.flops / 20e9

    def leaves(self) -> Iterator["Module"]:
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()


def gpt() -> Module:
    """The modules of `labkit.models.GPT`, as deep as they are called."""

    def linear(path: str, ins: int, outs: int, bias: bool = True) -> Module:
        return Module(path, "Linear", (ins + bias) * outs, 2 * TOKENS * ins * outs)

    def norm(path: str) -> Module:
        return Module(path, "LayerNorm", 2 * WIDTH, 8 * TOKENS * WIDTH)

    def block(path: str) -> Module:
        core = Module(f"{path}.attn.core", "CausalAttention", 0, 4 * TOKENS * CONTEXT * WIDTH)
        q, k, v, out = (
            linear(f"{path}.attn.{name}", WIDTH, WIDTH) for name in ("q", "k", "v", "out")
        )
        up = linear(f"{path}.mlp.up", WIDTH, 4 * WIDTH)
        down = linear(f"{path}.mlp.down", 4 * WIDTH, WIDTH)
        parts = [
            norm(f"{path}.norm1"),
            Module(f"{path}.attn", "Attention", parts=[q, k, v, core, out]),
            norm(f"{path}.norm2"),
            Module(f"{path}.mlp", "FeedForward", parts=[up, down]),
        ]
        return Module(path, "Block", parts=parts)

    tables = [
        Module("embed.tokens", "Embedding", VOCAB * WIDTH),
        Module("embed.positions", "Embedding", CONTEXT * WIDTH),
    ]
    parts = [
        Module("embed", "Embed", parts=tables),
        *(block(f"blocks.{i}") for i in range(DEPTH)),
        norm("norm"),
        linear("head", WIDTH, VOCAB, bias=False),
    ]
    return Module("", "GPT", parts=parts)


def sample_trace(ranks: int = 4, steps: int = 3, detail_step: int | None = 1) -> Trace:
    """`steps` steps of DDP on `ranks` ranks; step `detail_step` has memory and operations. Rank 0
    deals the batch by messages, three buckets travel in backward, the last rank is slower."""
    traces = {r: RankTrace(r, ranks, "cpu", "laptop") for r in range(ranks)}
    recorders = [_Rank(traces[r], 1 + 0.1 * (r == ranks - 1 > 0)) for r in range(ranks)]
    for index in range(steps):
        for one in recorders:
            one.begin(index, detail=index == detail_step)
        _deal(recorders)
        for one in recorders:
            one.forward()
            one.backward()
        _reduce(recorders)
        for one in recorders:
            one.end()
    about = {"what": "DDP of a small GPT", "world_size": ranks, "seed": 0}
    metrics = [
        {"step": s, "rank": r, "loss": 5.5 - 0.25 * s + 0.01 * r}
        for s in range(steps)
        for r in range(ranks)
    ]
    return Trace(traces, about, metrics)


class _Rank:
    def __init__(self, trace: RankTrace, slower: float):
        self.trace, self.usual = trace, slower
        self.model = gpt()
        self.params = sum(leaf.params for leaf in self.model.leaves())
        self.now_s = 0.0
        self.held = [4 * self.params, 0, 0, 0, 0, 0]  # bytes by category
        self.ready: list[tuple[float, int]] = []  # of each bucket: when it was full, its numbers

    def begin(self, index: int, detail: bool) -> None:
        self.step = Step(index, self.now_s, 0.0, detail)
        self.trace.steps.append(self.step)
        self.slower = self.usual * (DETAIL_SLOWER if detail else 1)
        self.note()

    def span(self, phase: str, module: Module, depth: int, factor: int = 0) -> Span:
        """Open a span; `factor` times the module's forward operations are its own."""
        span = Span(phase, module.path, self.step.index, self.now_s, 0.0, depth, module.kind)
        if self.step.detail:
            span.flops = factor * module.flops
            span.moved_bytes = factor * 4 * (module.params + 2 * TOKENS * WIDTH)
        self.trace.spans.append(span)
        return span

    def compute(self, seconds: float) -> None:
        self.now_s += seconds * self.slower

    def note(self) -> None:
        if self.step.detail:
            held = tuple(self.held)
            self.trace.memory.append(MemoryPoint(self.now_s, self.step.index, held))

    def forward(self) -> None:
        self._forward(self.model, 0)
        self.compute(30e-6)  # the loss

    def _forward(self, module: Module, depth: int) -> None:
        span = self.span("forward", module, depth, factor=1)
        self.compute(module.own_s)
        for part in module.parts:
            self._forward(part, depth + 1)
        if not module.parts:
            self.held[3] += 4 * TOKENS * WIDTH
            self.note()
        span.ended_s = self.now_s

    def backward(self) -> None:
        """All but its end: that is where the buckets are waited for."""
        self.whole = self.span("backward", Module("", ""), 0)
        self.compute(30e-6)
        leaves = list(self.model.leaves())[::-1]
        third, bucket, self.ready = self.params / 3, 0, []
        for leaf in leaves:
            span = self.span("backward", leaf, 1, factor=2)
            self.compute(2 * leaf.own_s)
            self.held[1] += 4 * leaf.params
            self.held[3] -= 4 * TOKENS * WIDTH
            self.note()
            span.ended_s = self.now_s
            bucket += leaf.params
            self.compute(5e-6)
            if bucket and (bucket >= third or leaf is leaves[-1]):
                self.ready.append((self.now_s, bucket))
                bucket = 0

    def end(self) -> None:
        self.compute(10e-6)
        self.whole.ended_s = self.now_s
        self.held[4] = 0
        self.note()
        span = self.span("optimizer", Module("", "AdamW"), 0)
        self.compute(OPTIMIZER_S)
        self.held[1], self.held[2] = 0, 8 * self.params
        self.note()
        self.step.ended_s = span.ended_s = self.now_s

    def event(self, op: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> CommEvent:
        """An operation of the group of all, numbered after those before it."""
        trace = self.trace
        seq = 1 + sum(x.op == op for x in trace.comms)
        event = CommEvent(
            op, "default", tuple(range(trace.size)), trace.rank, seq, dtype, shape, nbytes, 0, True,
            source="train.py:12 in train", step=self.step.index, lane="caller",
        )  # fmt: skip
        trace.comms.append(event)
        return event


def _deal(recorders: list[_Rank]) -> None:
    """Rank 0 sends every other its rows, all at once; each waits for its own."""
    first, nbytes = recorders[0], 8 * TOKENS
    issued_s = first.now_s
    span = first.span("user", Module("deal the batch", ""), 0)
    for one in recorders[1:]:
        sent = first.event("send", "int64", (ROWS, CONTEXT), nbytes)
        got = one.event("recv", "int64", (ROWS, CONTEXT), nbytes)
        sent.peer, got.peer = one.trace.rank, 0
        sent.seq = got.seq
        sent.blocking, sent.bus_bytes, sent.wire_bytes = False, nbytes, nbytes
        sent.lane = "backend"
        sent.issued_s = sent.began_s = issued_s = issued_s + 4e-6
        sent.ended_s = issued_s + LATENCY_S
        got.issued_s = got.began_s = got.wait_began_s = one.now_s
        got.ended_s = got.wait_ended_s = max(sent.ended_s, one.now_s) + LATENCY_S
        one.now_s = got.ended_s
    first.compute(DEAL_S)
    first.now_s = max(first.now_s, issued_s)
    for event in first.trace.comms[1 - len(recorders) :] if len(recorders) > 1 else ():
        event.wait_began_s = first.now_s
        first.now_s = event.wait_ended_s = max(first.now_s, event.ended_s) + 1e-6
    span.ended_s = first.now_s


def _reduce(recorders: list[_Rank]) -> None:
    """The buckets travel one after the other, each when all ranks have filled it."""
    size, free_s = len(recorders), 0.0
    for bucket, (_, numel) in enumerate(recorders[0].ready):
        chunks = [4 * n for n in chunk_sizes(numel, size)]
        began_s = max(free_s, *(one.ready[bucket][0] for one in recorders))
        for rank, one in enumerate(recorders):
            event = one.event("all_reduce", "float32", (numel,), 4 * numel)
            event.bus_bytes = event.wire_bytes = all_reduce_bus_bytes(chunks, rank)
            event.blocking, event.lane = False, "lane"
            event.issued_s = one.ready[bucket][0]
            event.began_s = began_s + 2e-6 * rank
            event.ended_s = event.began_s + LATENCY_S + event.bus_bytes / BYTES_PER_S
        free_s = max(one.trace.comms[-1].ended_s for one in recorders)
    for one in recorders:
        count = len(one.ready)
        one.held[4] = 4 * max(numel for _, numel in one.ready)
        for event in one.trace.comms[-count:]:
            event.wait_began_s = one.now_s
            one.now_s = event.wait_ended_s = max(one.now_s, event.ended_s) + 1e-6
