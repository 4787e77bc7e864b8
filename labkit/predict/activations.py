"""Activations: the tensors that one transformer layer keeps from forward for backward.

Bytes per s·b·w (s sequence length, b rows, w width, a heads), at 2 bytes per element and 1 per mask
element, in the paper and in labkit.GPT's block:

    norm1       its input 2                     norm2       its input 2
    q, k, v     their shared input 2            mlp.up      its input 2
    core        q, k, v 6                       GELU        its input 8
                weights 2as/w                   mlp.down    its input 8
                their dropout: mask as/w,       dropout     its mask 1
                its output 2as/w
    out         its input 2                     ──────────────────────────────────
    dropout     its mask 1                      34 + 5as/w

For labkit.GPT in bfloat16, with dropout and `labkit.models.PlainAttention`, this is exact to the
byte (`labkit.memory.saved.saved_by`) except for the statistics of the two norms: 8·s·b (on a GPU
16·s·b), below 0.1 % for widths of 256 or more. It assumes 1 byte per element of a dropout mask
(torch's nn.Dropout on a CPU keeps 2 in bfloat16: 11 % more at 5as/w = 20) and 2 per score (4 in
torch's plain attention). It counts the scores of masked positions, but not the causal mask.

With t tensor-parallel ranks, activations between the sharded matrices are sharded as well, by heads
and features; the other 10 of the 34 are replicated, unless sharded along the sequence:

    one rank                             34 + 5as/w
    tensor parallel                      10 + 24/t + 5as/(wt)
    and sequence parallel                34/t + 5as/(wt)       inputs are kept as shards, too
    selective recomputation              no as/w term
    full recomputation                   2, or 2/t if the input is sharded along the sequence

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv
2205.05198, section 4 and Table 2.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from labkit.predict.sizes import check_counts, check_divides, check_not_negative
from labkit.predict.tables import Table, in_full, rounded

RECOMPUTED = ("none", "selective", "full")
STATISTICS = "statistics of the norms"  # 8sb or 16sb, which the formula omits
OTHERS = "other"


@dataclass(frozen=True)
class Term:
    """One term of the formula, and the module of labkit.GPT's block that keeps these bytes."""

    name: str
    module: str
    of_sbw: int = 0  # bytes per s·b·w
    of_scores: int = 0  # bytes per score, of a·s·s·b scores
    outside: bool = False  # outside the sharded matrices: replicated by tensor parallelism

    @property
    def per_sbw(self) -> str:
        """The term in the paper's notation, such as "2" or "4as/w"."""
        if not self.of_scores:
            return str(self.of_sbw)
        return f"{self.of_scores if self.of_scores > 1 else ''}as/w"


TERMS = (
    Term("norm1: its input", "norm1", of_sbw=2, outside=True),
    Term("q, k, v: their shared input", "attn.q", of_sbw=2, outside=True),
    Term("core: q, k and v", "attn.core", of_sbw=6),
    Term("core: weights, before and after dropout", "attn.core", of_scores=4),
    Term("core: the mask of its dropout", "attn.core.dropout", of_scores=1),
    Term("out: its input", "attn.out", of_sbw=2),
    Term("dropout: two masks", "dropout", of_sbw=2, outside=True),
    Term("norm2: its input", "norm2", of_sbw=2, outside=True),
    Term("mlp.up: its input", "mlp.up", of_sbw=2, outside=True),
    Term("GELU: its input", "mlp", of_sbw=8),
    Term("mlp.down: its input", "mlp.down", of_sbw=8),
)
# The only term that full recomputation keeps.
LAYER_INPUT = Term("the layer's input", "", of_sbw=2, outside=True)


def activation_terms(
    sequence: int,
    rows: int,
    width: int,
    heads: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> dict[str, float]:
    """`activation_bytes` by term: name -> bytes. Source: arXiv 2205.05198, sections 4.1 and 4.2."""
    check_counts(sequence=sequence, rows=rows, width=width, heads=heads)
    check_counts(tensor_parallel=tensor_parallel)
    check_divides("width", width, "heads", heads)
    check_divides("heads", heads, "tensor_parallel", tensor_parallel)
    if recompute not in RECOMPUTED:
        raise ValueError(f"recompute={recompute!r}: choose one of {', '.join(RECOMPUTED)}")
    terms = {"none": TERMS, "full": (LAYER_INPUT,)}.get(
        recompute, tuple(term for term in TERMS if not term.of_scores)
    )
    sbw, scores = sequence * rows * width, heads * sequence * sequence * rows
    over = {True: tensor_parallel if sequence_parallel else 1, False: tensor_parallel}
    return {
        term.name: (term.of_sbw * sbw + term.of_scores * scores) / over[term.outside]
        for term in terms
    }


def activation_bytes(
    sequence: int,
    rows: int,
    width: int,
    heads: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes that one layer keeps on one rank for one micro-batch of `rows`, in 2-byte dtypes, if
    `tensor_parallel` ranks shard its matrices and heads. `sequence_parallel`: these ranks also
    shard norms, dropout and inputs, along the sequence. `recompute`: "none"; "selective": the
    attention core; "full": the layer, from its input. Source: arXiv 2205.05198, Table 2."""
    terms = activation_terms(
        sequence, rows, width, heads, tensor_parallel, sequence_parallel, recompute
    )
    return sum(terms.values())


def flash_activation_bytes(sequence: int, rows: int, width: int, heads: int) -> float:
    """`activation_bytes` with an attention kernel that stores no scores, like labkit.GPT's: 4
    bytes per row of scores (the logsumexp) replace 5as/w. One rank, no attention dropout.
    Source: Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1 and Algorithm 1."""
    without_scores = activation_bytes(sequence, rows, width, heads, recompute="selective")
    return without_scores + 4 * heads * sequence * rows


def first_stage_activation_bytes(
    layer_bytes: float, depth: int, stages: int = 1, chunks: int = 1
) -> float:
    """Peak activation bytes of a pipeline's first stage, for p or more micro-batches, excluding
    embedding and head. `layer_bytes`: per layer and micro-batch; `depth`: the model's layers.
    1F1B keeps p micro-batches in flight on depth/p layers, as many bytes as `depth` layers keep.
    Interleaving with v > 1 chunks per stage keeps (1 + (p-1)/(pv)) times as many; the factor does
    not apply to v = 1. Source: arXiv 2205.05198, section 4.2.3."""
    check_not_negative(layer_bytes=layer_bytes)
    check_counts(depth=depth, stages=stages, chunks=chunks)
    check_divides("depth", depth, "stages x chunks", stages * chunks)
    more = 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0
    return layer_bytes * depth * more


# --- a layer's bill: each term next to the measured bytes


@dataclass(frozen=True)
class Line:
    """One line of a layer's bill: bytes kept for one term, by formula and measured."""

    term: str  # "q, k, v: their shared input"
    per_sbw: str  # "2", "2as/w", "6/t"; "" for bytes that no formula counts
    formula_bytes: float
    measured_bytes: int


@dataclass(frozen=True)
class Bill:
    """The bytes that one layer keeps, term by term; displays as a table in a notebook."""

    lines: list[Line]

    @property
    def formula_bytes(self) -> float:
        return sum(line.formula_bytes for line in self.lines)

    @property
    def measured_bytes(self) -> int:
        return sum(line.measured_bytes for line in self.lines)

    @property
    def table(self) -> Table:
        rows = [
            (line.term, line.per_sbw, rounded(line.formula_bytes), in_full(line.measured_bytes),
             "✓ equal" if line.formula_bytes == line.measured_bytes else "")
            for line in self.lines
        ]  # fmt: skip
        sums = ("total", "", rounded(self.formula_bytes), in_full(self.measured_bytes), "")
        heads = ("kept", "× sbw", "formula (bytes)", "measured (bytes)", "")
        return Table(heads, [*rows, sums])

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def activation_bill(
    kept: Iterable[Any],
    sequence: int,
    rows: int,
    width: int,
    heads: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> Bill:
    """The bytes that a labkit.GPT block kept, next to the formula's terms, and two more lines, for
    norm statistics and "other".

    `kept`: from `labkit.memory.saved.saved_by(block, x)`, x [rows, sequence, width] in a 2-byte
    dtype, with `labkit.models.PlainAttention` as the core. With `sequence_parallel`, x is this
    rank's shard of the positions, and `sequence` counts all positions. Scores are recognized by
    their shape, [..., s, s], so the head width must differ from the sequence length. Other
    arguments: as in `activation_bytes`."""
    formula = activation_terms(
        sequence, rows, width, heads, tensor_parallel, sequence_parallel, recompute
    )
    over = "/t" if tensor_parallel > 1 else ""
    measured = dict.fromkeys([*formula, STATISTICS, OTHERS], 0)
    for tensor in kept:
        term = _term_of(tensor, sequence)
        measured[term if term in measured else OTHERS] += tensor.nbytes
    shares = {
        term.name: term.per_sbw if term.outside and not sequence_parallel else term.per_sbw + over
        for term in (*TERMS, LAYER_INPUT)
    }
    lines = [
        Line(term, shares.get(term, ""), formula.get(term, 0.0), nbytes)
        for term, nbytes in measured.items()
        if formula.get(term, 0.0) or nbytes
    ]
    return Bill(lines)


def _term_of(tensor: Any, sequence: int) -> str:
    if "norm" in tensor.module and tensor.shape[-1] == 1:
        return STATISTICS
    scores = tensor.module.startswith("attn.core") and tensor.shape[-2:] == (sequence, sequence)
    for term in (*TERMS, LAYER_INPUT):
        if term.module == tensor.module and bool(term.of_scores) == scores:
            return term.name
    return OTHERS
