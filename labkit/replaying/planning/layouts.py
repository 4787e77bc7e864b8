"""Every layout in which so many ranks can train a model on a batch.

    1,024 ranks = tp · pp · dp       tp  divides the heads
                                     pp  times the chunks of a stage divides the blocks
                                     dp  times the rows of a micro-batch divides those of a batch

No more is asked of a layout. That tensor parallelism belongs into a node is for the step times to
say, and so a tp of 16 is among them. On an axis of one rank a choice that is made for the axis
means nothing and stands as it is in `Layout()`: ZeRO over one replica, sequence parallelism over
one rank, chunks of one stage.

Of micro-batches and of chunks the powers of two are tried, unless others are named: between two
of them a step time changes little. Micro-batches end where their products are long enough: at
16,384 positions, 8 rows of 2,048, a product in tiles of 128 has 99 % of its speed, and a larger
one only makes the bubble longer (arXiv 2104.04473, section 3.4).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from labkit.predict.sizes import check_counts
from labkit.replaying.planning.layout import Layout, Sizes

ZERO = (0, 1)  # what is tried if nothing is named
SEQUENCE = (False, True)
RECOMPUTE = ("none", "full")
ENOUGH_POSITIONS = 16_384  # of a micro-batch

Several = int | Iterable[int] | None  # None: whatever there is
Wanted = Mapping[str, tuple[int, ...] | None]


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
    """All layouts of `ranks` ranks that factor, each once; whether they fit is not asked.

    Args:
        global_batch: rows of a step, over all replicas.
        tp, pp, dp, microbatch, chunks, zero: a number, or several to choose from.
        sequence: with sequence parallelism or without; both if None.
        recompute: "none", "full" or several; both if None.

    Raises ValueError for a number that can be in no layout, with those that can; and where no
    layout is left, with the nearest numbers of ranks that have one.
    """
    check_counts(ranks=ranks, global_batch=global_batch)
    assert sizes.parameters  # raises where width and heads do not go together
    wanted: Wanted = {
        "tp": _several("tp", tp, sizes.heads, f"{sizes.heads} heads"),
        "pp": _several("pp", pp, sizes.depth, f"{sizes.depth} blocks"),
        "dp": _several("dp", dp, global_batch, f"{global_batch} rows"),
        "microbatch": _several("microbatch", microbatch, global_batch, f"{global_batch} rows"),
        "chunks": _several("chunks", chunks, sizes.depth, f"{sizes.depth} blocks"),
        "zero": _known("zero", zero, ZERO),
    }
    of_ranks = list(_of_ranks(sizes, ranks, global_batch, wanted))
    if not of_ranks:
        raise ValueError(_no_layout(sizes, ranks, global_batch, wanted))
    words = _words(recompute)
    every = [
        one for axes in of_ranks
        for one in _choices(axes, sizes, wanted["zero"] or ZERO, sequence, words)
    ]  # fmt: skip
    if not every:
        raise ValueError(
            f"sequence=True: {sizes.context} positions divide over none of these tp: "
            f"{in_a_row(sorted({one.tp for one in of_ranks}))}; take another context"
        )
    return every


def divisors(number: int) -> list[int]:
    """All of them, from 1 up."""
    small = [one for one in range(1, int(number**0.5) + 1) if not number % one]
    return sorted({*small, *(number // one for one in small)})


def powers_of_two(number: int) -> list[int]:
    """Those that divide it, from 1 up."""
    return [one for one in divisors(number) if not one & (one - 1)]


def small_enough(rows: int, context: int) -> list[int]:
    """The micro-batches to try of so many rows; one row in any case."""
    return [one for one in powers_of_two(rows) if one == 1 or one * context <= ENOUGH_POSITIONS]


def _of_ranks(sizes: Sizes, ranks: int, global_batch: int, wanted: Wanted) -> Iterator[Layout]:
    """Of axes, micro-batch and chunks."""
    for tp, pp in product(
        wanted["tp"] or divisors(sizes.heads), wanted["pp"] or divisors(sizes.depth)
    ):
        dp, left = divmod(ranks, tp * pp)
        if left or not dp or global_batch % dp or dp not in (wanted["dp"] or (dp,)):
            continue
        rows = global_batch // dp
        for microbatch in wanted["microbatch"] or small_enough(rows, sizes.context):
            if rows % microbatch:
                continue
            for chunks in (
                (wanted["chunks"] or powers_of_two(sizes.depth // pp)) if pp > 1 else (1,)
            ):
                # Interleaved, a stage goes through its micro-batches in groups of pp.
                if sizes.depth % (pp * chunks) or (chunks > 1 and rows // microbatch % pp):
                    continue
                yield Layout(tp, pp, dp, microbatch, chunks)


def _choices(
    one: Layout, sizes: Sizes, zero: Iterable[int], sequence: bool | None, recompute: Iterable[str]
) -> Iterator[Layout]:
    """The layout with each choice that means something in it."""
    stages = zero if one.dp > 1 else (0,)
    cut = (False,) if one.tp == 1 else SEQUENCE if sequence is None else (sequence,)
    for of_zero, of_sequence, of_blocks in product(stages, cut, recompute):
        if not (of_sequence and sizes.context % one.tp):
            yield Layout(
                one.tp, one.pp, one.dp, one.microbatch, one.chunks, of_zero, of_sequence, of_blocks
            )


def several(given: Several) -> tuple[int, ...]:
    """One number or more, each once; none if nothing is named."""
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(dict.fromkeys(given))


def _several(name: str, given: Several, whole: int, of: str) -> tuple[int, ...] | None:
    """What was named, all of it divisors of `whole`."""
    if given is None:
        return None
    numbers = several(given)
    if not numbers:
        raise ValueError(f"{name} has no numbers to choose from; name some, or leave it out")
    for number in numbers:
        check_counts(**{name: number})
        if whole % number:
            raise ValueError(
                f"{name}={number}: {of} do not divide by {number}; "
                f"{in_a_row(divisors(whole))} would do"
            )
    return numbers


def _known(name: str, given: Several, known: tuple[int, ...]) -> tuple[int, ...] | None:
    if given is None:
        return None
    numbers = several(given)
    for number in numbers:
        if number not in known:
            raise ValueError(
                f"{name}={number}: a plan knows {in_a_row(known)}. Stages 2 and 3 cut gradients "
                "and parameters, which a pipeline needs whole for each of its micro-batches"
            )
    return numbers or None


def _words(given: str | Iterable[str] | None) -> tuple[str, ...]:
    if given is None:
        return RECOMPUTE
    words = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))
    for word in words:
        if word not in RECOMPUTE:
            raise ValueError(f"recompute={word!r}: a plan knows {' and '.join(RECOMPUTE)}")
    return words


def _no_layout(sizes: Sizes, ranks: int, global_batch: int, wanted: Wanted) -> str:
    """What does not factor, and the numbers of ranks that do."""
    named = [
        f"{name} {in_a_row(numbers)}" for name, numbers in wanted.items() if numbers is not None
    ]
    would = sorted(
        {
            tp * pp * dp
            for tp in wanted["tp"] or divisors(sizes.heads)
            for pp in wanted["pp"] or divisors(sizes.depth)
            for dp in wanted["dp"] or divisors(global_batch)
        }
    )
    below = [n for n in reversed(would) if n < ranks]
    above = [n for n in would if n > ranks]
    near = [
        next((n for n in side if any(_of_ranks(sizes, n, global_batch, wanted))), 0)
        for side in (below, above)
    ]
    return (
        f"no layout of {ranks} ranks: tp must divide {sizes.heads} heads, pp {sizes.depth} blocks, "
        f"dp times the micro-batch {global_batch} rows, and tp · pp · dp be {ranks}"
        + (f", with {', '.join(named)}" if named else "")
        + (f"; {' and '.join(str(n) for n in near if n)} ranks would do" if any(near) else "")
    )


def in_a_row(numbers: Iterable[int]) -> str:
    """ "1, 2 or 4"."""
    *rest, last = [str(number) for number in numbers]
    return f"{', '.join(rest)} or {last}" if rest else last
