"""The layout of a model on a cluster, and all layouts for a given number of ranks.

    Layout(tp=8, pp=8, dp=16, microbatch=1)      1,024 ranks, tensor parallelism innermost
    a batch of 1536 rows   over dp 16:  96 rows per replica, in 96 micro-batches of 1 row
    a model of 96 blocks   over pp 8:   12 blocks per stage, each block sharded over tp 8

If an axis has one rank, its options (ZeRO, sequence parallelism, chunks) keep their defaults. By
default, micro-batches and chunks are powers of two, and a micro-batch has one row or at most 16,384
positions, with which a matmul in tiles of 128 reaches 99 % of full speed (arXiv 2104.04473, 3.4).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from labkit.predict.sizes import check_counts
from labkit.predict.transformer import parameters, step_flops

ZERO_STAGES = (0, 1)
RECOMPUTE = ("none", "full")
MAX_POSITIONS = 16_384  # per micro-batch

Several = int | Iterable[int] | None  # None: every valid value
Wanted = Mapping[str, tuple[int, ...]]  # empty: every valid value


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT: the arguments of labkit.GPT(vocab, width, depth, heads, context)."""

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

    def step_flops(self, rows: int) -> float:
        """FLOPs per step on `rows` rows, without recomputation."""
        return step_flops(self.vocab, self.width, self.depth, self.heads, rows, self.context)


@dataclass(frozen=True)
class Layout:
    """The number of ranks per axis, and options.

    Attributes:
        tp, pp, dp: ranks of tensor, pipeline and data parallelism.
        microbatch: rows of one micro-batch.
        chunks: model chunks per stage (interleaved 1F1B); 1 is plain 1F1B.
        zero: 0 for DDP, 1 for ZeRO stage 1 over dp.
        sequence: whether to use sequence parallelism over tp.
        recompute: "none" or "full" (each block keeps only its input).
        scatter_gather: whether messages between stages are sharded over tp, then all-gathered.
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

    @property
    def shards(self) -> int:
        """Number of optimizer-state shards: dp with ZeRO, else 1."""
        return self.dp if self.zero else 1

    @property
    def gathers_messages(self) -> bool:
        """Whether stages all-gather received messages over tp (scatter/gather)."""
        return self.scatter_gather and self.tp > 1 and self.pp > 1 and not self.sequence

    def microbatches(self, global_batch: int) -> int:
        """Micro-batches per replica in a step of `global_batch` rows."""
        return global_batch // (self.dp * self.microbatch)

    @property
    def in_words(self) -> str:
        return f"tp {self.tp} · pp {self.pp} · dp {self.dp} · b {self.microbatch}"


def described(layout: Layout) -> str:
    """The layout as text, including options that differ from their defaults."""
    choices = {
        f"{layout.chunks} chunks": layout.chunks > 1,
        f"zero {layout.zero}": layout.zero,
        "sequence": layout.sequence,
        f"recompute {layout.recompute}": layout.recompute != "none",
    }
    return " · ".join([layout.in_words, *(name for name, chosen in choices.items() if chosen)])


def layouts(
    sizes: Sizes,
    ranks: int,
    global_batch: int,
    *,
    tp: Several = None,
    pp: Several = None,
    dp: Several = None,
    microbatch: Several = None,
    chunks: Several = None,
    zero: Several = None,
    sequence: bool | None = None,
    recompute: str | Iterable[str] | None = None,
) -> list[Layout]:
    """Every layout of `ranks` ranks that divides the model and the batch, even if it does not fit.

    Args:
        global_batch: rows per step, over all replicas.
        tp, pp, dp, microbatch, chunks, zero, recompute ("none", "full"): one allowed value, or
            several; if None, every valid value (for microbatch and chunks, every power of two).
        sequence: with or without sequence parallelism; both if None.

    Raises ValueError for an invalid value, or if no layout remains (naming the nearest rank counts
    that have a layout).
    """
    check_counts(ranks=ranks, global_batch=global_batch)
    assert sizes.parameters  # raises ValueError unless the heads divide the width
    wanted: Wanted = {
        "tp": _divisors_of("tp", tp, sizes.heads, "heads"),
        "pp": _divisors_of("pp", pp, sizes.depth, "blocks"),
        "dp": _divisors_of("dp", dp, global_batch, "rows"),
        "microbatch": _divisors_of("microbatch", microbatch, global_batch, "rows"),
        "chunks": _divisors_of("chunks", chunks, sizes.depth, "blocks"),
        "zero": several(zero),
    }
    for stage in wanted["zero"]:
        if stage not in ZERO_STAGES:
            raise ValueError(
                f"zero={stage}: choose {_either(ZERO_STAGES)}. Stages 2 and 3 shard gradients and "
                "parameters, which a pipeline needs unsharded in every micro-batch"
            )
    of_ranks = list(_of_ranks(sizes, ranks, global_batch, wanted))
    if not of_ranks:
        raise ValueError(_no_layout(sizes, ranks, global_batch, wanted))
    choices = RECOMPUTE if recompute is None else several(recompute)
    for choice in choices:
        if choice not in RECOMPUTE:
            raise ValueError(f"recompute={choice!r}: choose {' or '.join(RECOMPUTE)}")
    every = [
        replace(layout, zero=stage, sequence=sharded, recompute=choice)
        for layout in of_ranks
        for stage, sharded, choice in product(
            (wanted["zero"] or ZERO_STAGES) if layout.dp > 1 else (0,),
            (False,) if layout.tp == 1 else (False, True) if sequence is None else (sequence,),
            choices,
        )
        if not (sharded and sizes.context % layout.tp)
    ]
    if not every:
        raise ValueError(
            f"sequence=True: {sizes.context} positions are not divisible by tp "
            f"{_either(sorted({layout.tp for layout in of_ranks}))}; choose another context"
        )
    return every


def _of_ranks(sizes: Sizes, ranks: int, global_batch: int, wanted: Wanted) -> Iterator[Layout]:
    """Layouts that differ in axes, micro-batch or chunks; other options keep their defaults."""
    for tp, pp in product(
        wanted["tp"] or divisors(sizes.heads), wanted["pp"] or divisors(sizes.depth)
    ):
        dp, left = divmod(ranks, tp * pp)
        if left or not dp or global_batch % dp or dp not in (wanted["dp"] or (dp,)):
            continue
        rows = global_batch // dp
        few = [b for b in powers_of_two(rows) if b == 1 or b * sizes.context <= MAX_POSITIONS]
        for microbatch in wanted["microbatch"] or few:
            if rows % microbatch:
                continue
            for chunks in (
                (wanted["chunks"] or powers_of_two(sizes.depth // pp)) if pp > 1 else (1,)
            ):
                # Interleaved stages process micro-batches in groups of pp.
                if sizes.depth % (pp * chunks) or (chunks > 1 and rows // microbatch % pp):
                    continue
                yield Layout(tp, pp, dp, microbatch, chunks)


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if not number % n]
    return sorted({*small, *(number // n for n in small)})


def powers_of_two(number: int) -> list[int]:
    """Powers of two that divide `number`, in ascending order."""
    return [n for n in divisors(number) if not n & (n - 1)]


def several(given: Any) -> tuple[Any, ...]:
    """One or more values as a tuple without duplicates; empty for None."""
    if given is None:
        return ()
    return (given,) if isinstance(given, int | str) else tuple(dict.fromkeys(given))


def _divisors_of(name: str, given: Several, whole: int, of: str) -> tuple[int, ...]:
    numbers = several(given)
    if given is not None and not numbers:
        raise ValueError(f"{name} has no values to choose from; pass some, or omit it")
    for number in numbers:
        check_counts(**{name: number})
        if whole % number:
            raise ValueError(
                f"{name}={number}: {whole} {of} are not divisible by {number}; "
                f"choose {_either(divisors(whole))}"
            )
    return numbers


def _no_layout(sizes: Sizes, ranks: int, global_batch: int, wanted: Wanted) -> str:
    """An error message: the divisibility rules, and the nearest rank counts with a layout."""
    named = [f"{name} {_either(numbers)}" for name, numbers in wanted.items() if numbers]
    counts = {
        tp * pp * dp
        for tp in wanted["tp"] or divisors(sizes.heads)
        for pp in wanted["pp"] or divisors(sizes.depth)
        for dp in wanted["dp"] or divisors(global_batch)
    }
    below = sorted((n for n in counts if n < ranks), reverse=True)
    above = sorted(n for n in counts if n > ranks)
    near = [
        next((n for n in side if any(_of_ranks(sizes, n, global_batch, wanted))), 0)
        for side in (below, above)
    ]
    return (
        f"no layout of {ranks} ranks: tp must divide {sizes.heads} heads, pp {sizes.depth} blocks, "
        f"dp times the micro-batch {global_batch} rows, and tp · pp · dp must be {ranks}"
        + (f", with {', '.join(named)}" if named else "")
        + (f"; choose {' or '.join(str(n) for n in near if n)} ranks" if any(near) else "")
    )


def _either(numbers: Iterable[int]) -> str:
    """The values as text, for example "1, 2 or 4"."""
    *rest, last = [str(number) for number in numbers]
    return f"{', '.join(rest)} or {last}" if rest else last
