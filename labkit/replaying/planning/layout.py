"""How a model is laid out on a cluster: the sizes of three axes, and what each of them does.

    Layout(tp=8, pp=8, dp=16, microbatch=1)      1,024 ranks, counted tensor innermost

    a batch of 1536 rows   over dp 16:  96 rows for each replica, 96 micro-batches of 1
    a model of 96 blocks   over pp 8:   12 blocks on each stage, each cut over tp 8

This is the mesh `Mesh(pp=8, dp=16, tp=8)` of arXiv 2104.04473, in numbers alone: it knows no torch.
"""

from dataclasses import dataclass

from labkit.predict.transformer import parameters


@dataclass(frozen=True)
class Sizes:
    """A GPT's, as labkit.GPT(vocab, width, depth, heads, context) takes them."""

    width: int
    depth: int
    heads: int
    context: int = 2048
    vocab: int = 51200
    tied: bool = True

    @property
    def parameters(self) -> int:
        return parameters(
            self.vocab, self.width, self.depth, self.heads, self.context, tied=self.tied
        )


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis, and the choices that go with them.

    Attributes:
        tp, pp, dp: ranks of tensor, pipeline and data parallelism.
        microbatch: rows of one micro-batch.
        chunks: of each stage (interleaved 1F1B); 1 is plain 1F1B.
        zero: 0 for DDP, or 1 for ZeRO's stage 1 over dp.
        sequence: sequence parallelism, over tp.
        recompute: "none" or "full" (each block keeps its input alone).
        scatter_gather: a message between stages is cut over tp, and put together on arrival.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    microbatch: int = 1
    chunks: int = 1
    zero: int = 0
    sequence: bool = False
    recompute: str = "none"
    scatter_gather: bool = True

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def microbatches(self, global_batch: int) -> int:
        """Of each replica, in a step on so many rows."""
        return global_batch // (self.dp * self.microbatch)

    @property
    def in_words(self) -> str:
        return f"tp {self.tp} · pp {self.pp} · dp {self.dp} · b {self.microbatch}"
