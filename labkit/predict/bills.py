"""The bill of one layer: each term of sbw(34 + 5as/w) beside what its modules keep: what autograd
saves, tensor by tensor (`labkit.memory.saved.saved_by(block, x)`), summed by module.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from labkit.predict.activations import LAYER_INPUT, TERMS, activation_terms
from labkit.predict.tables import Table, rounded, written

STATISTICS = "statistics of the norms"  # 8sb or 16sb, which the formula leaves out
OTHERS = "other"


@dataclass(frozen=True)
class Line:
    """One term of the bill."""

    term: str  # "q, k, v: their shared input"
    per_sbw: str  # "2", "2as/w", "6/t"; "" for what no formula counts
    formula_bytes: float
    measured_bytes: int


@dataclass(frozen=True)
class Bill:
    """What one layer keeps, term by term. In a notebook, a table."""

    lines: list[Line]
    recompute: str = "none"

    @property
    def formula_bytes(self) -> float:
        return sum(line.formula_bytes for line in self.lines)

    @property
    def measured_bytes(self) -> int:
        return sum(line.measured_bytes for line in self.lines)

    @property
    def table(self) -> Table:
        rows = [
            (line.term, line.per_sbw, rounded(line.formula_bytes), written(line.measured_bytes),
             "✓ equal" if line.formula_bytes == line.measured_bytes else "")
            for line in self.lines
        ]  # fmt: skip
        sums = ("in all", "", rounded(self.formula_bytes), written(self.measured_bytes), "")
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
    """What a labkit.GPT block has kept, beside the formula's terms.

    Args:
        kept: of `labkit.memory.saved.saved_by(block, x)`, each with its `module`, `shape` and
            `nbytes`; x [rows, sequence, width] in a 2-byte dtype, `labkit.models.PlainAttention` as
            the core. With `sequence_parallel`, x is this rank's shard of the positions; `sequence`
            are all of them.
        tensor_parallel, sequence_parallel, recompute: as in `activation_bytes`.

    At the end comes what no term counts: the statistics of the norms, and "other". Scores are known
    by their shape, [..., s, s]: no head may be as wide as the sequence is long.
    """
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
    return Bill(lines, recompute)


def _term_of(tensor: Any, sequence: int) -> str:
    """The term that counts a kept tensor; at the core of attention, scores are apart."""
    if "norm" in tensor.module and tensor.shape[-1] == 1:
        return STATISTICS
    scores = tensor.module.startswith("attn.core") and tensor.shape[-2:] == (sequence, sequence)
    for term in (*TERMS, LAYER_INPUT):
        if term.module == tensor.module and bool(term.of_scores) == scores:
            return term.name
    return OTHERS
