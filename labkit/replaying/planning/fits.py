"""Does it fit, and what is the largest that does.

    at least     model states of the fullest stage, and what its micro-batches keep: formulas,
                 which leave out what a step needs for a moment, and so never say too much
    exactly      the peak of a recorded step: `StepReport.memory_bytes`

The formulas cost nothing and refuse most of what does not fit; a recording decides on the rest. In
the same way the layout that holds the least is found: in the order of the formulas, until the next
is promised more than the least that a recording has found.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from labkit.predict.activations import activation_terms
from labkit.predict.pipelines import interleaved
from labkit.predict.states import MIXED_ADAM
from labkit.predict.tables import Table
from labkit.replaying.planning.layout import Layout, Sizes
from labkit.replaying.planning.report import StepReport
from labkit.runtime.progress import slow_progress

GB = 1e9
MASKS = "dropout: two masks"  # a step at scale is recorded without dropout

Report = Callable[[Sizes, Layout], StepReport]


@dataclass(frozen=True)
class TooLarge:
    """A layout that does not fit. `at_least`: by the formulas, which leave something out."""

    layout: Layout
    memory_bytes: Mapping[str, float]
    at_least: bool = False

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True)
class Fit:
    """The answer, and the layout that it rests on: the one that holds the least, or in which the
    largest fits.

    Attributes:
        others: layouts of which the formulas said that they hold more, or fit less.
    """

    report: StepReport
    budget_bytes: float
    others: int = 0

    @property
    def fits(self) -> bool:
        return self.report.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        sizes, layout = self.report.sizes, self.report.layout
        held, has = self.report.peak_bytes / GB, self.budget_bytes / GB
        on = (
            f"{sizes.parameters / 1e9:,.1f}B parameters ({sizes.depth} blocks of width "
            f"{sizes.width}) on {layout.ranks} device{'s' * (layout.ranks > 1)}"
        )
        if self.fits:
            return f"{on}: fits, as {described(layout)}, with {held:.1f} GB of {has:.1f} GB"
        return (
            f"{on}: does not fit; {described(layout)} holds the least, {held:.1f} GB of "
            f"{has:.1f} GB, {held - has:.1f} GB too much"
        )

    def table(self) -> Table:
        """What the fullest stage holds at its peak, by category."""
        held = self.report.memory_bytes
        rows: list[tuple[str, ...]] = [
            (name, f"{held[name] / GB:.2f}", f"{held[name] / self.budget_bytes:.1%}", "")
            for name in held
            if held[name]
        ]
        free = self.budget_bytes - self.report.peak_bytes
        last = ("free" if free >= 0 else "too much", f"{abs(free) / GB:.2f}")
        rows.append((*last, f"{abs(free) / self.budget_bytes:.1%}", ""))
        return Table(("at the peak", "GB", "of a device", ""), rows)

    def _repr_html_(self) -> str:
        return f"<p>{self}</p>{self.table()._repr_html_()}"


def described(layout: Layout) -> str:
    """A layout with the choices that are not as usual, in words."""
    words = [layout.in_words]
    if layout.chunks > 1:
        words.append(f"{layout.chunks} chunks")
    if layout.zero:
        words.append(f"zero {layout.zero}")
    if layout.sequence:
        words.append("sequence")
    if layout.recompute != "none":
        words.append(f"recompute {layout.recompute}")
    return " · ".join(words)


def least_bytes(sizes: Sizes, layout: Layout, global_batch: int) -> dict[str, float]:
    """Bytes that the first stage holds at the least, by category: a lower bound of its peak.

    Parameters and gradients of 2 bytes, Adam's states and master copies of 12 (arXiv 1910.02054),
    of the matrices alone; what its blocks keep for the micro-batches that are under way (arXiv
    2205.05198), without dropout and with attention that stores no scores.
    """
    width, tp = sizes.width, layout.tp
    blocks = sizes.depth // layout.pp
    numbers = (12 * width**2 * blocks + sizes.vocab * width) / tp
    shards = layout.dp if layout.zero >= 1 else 1
    terms = activation_terms(
        sizes.context, layout.microbatch, width, sizes.heads, tp, layout.sequence,
        "full" if layout.recompute == "full" else "selective",
    )  # fmt: skip
    kept = sum(held for name, held in terms.items() if name != MASKS)
    count = layout.microbatches(global_batch)
    under_way = interleaved(layout.pp, count, 1, 2, layout.chunks).peak_microbatches
    return {
        "parameters": numbers * MIXED_ADAM.parameter,
        "gradients": numbers * MIXED_ADAM.gradient,
        "optimizer state": numbers * MIXED_ADAM.optimizer / shards,
        "activations": kept * blocks * under_way,
    }


def by_promise(every: Iterable[Layout], sizes: Sizes, global_batch: int) -> list[TooLarge]:
    """The layouts in order of what the formulas promise, the smallest first."""
    promised = [TooLarge(one, least_bytes(sizes, one, global_batch), True) for one in every]
    return sorted(promised, key=lambda one: one.peak_bytes)


def least(
    every: Iterable[Layout], sizes: Sizes, global_batch: int, budget_bytes: float, report: Report
) -> Fit:
    """The layout that holds the least, recorded."""
    promised = by_promise(every, sizes, global_batch)
    best, asked = report(sizes, promised[0].layout), 1
    for one in slow_progress(promised[1:], "recording layouts"):
        if one.peak_bytes >= best.peak_bytes:
            break
        found, asked = report(sizes, one.layout), asked + 1
        if found.peak_bytes < best.peak_bytes:
            best = found
    return Fit(best, budget_bytes, len(promised) - asked)


def deepest(
    every: Sequence[Layout], sizes: Sizes, global_batch: int, budget_bytes: float, report: Report
) -> Fit | None:
    """The most blocks of this width, over all these layouts; None if one block a stage is too
    much. A stage that has more blocks holds more, so the most of one layout is found by halving,
    and a layout whose formulas promise no more than what was found is not recorded."""

    def most(one: Layout) -> int:
        return _halved(
            lambda blocks: _sum(_deep(sizes, one, blocks), one, global_batch) <= budget_bytes
        )

    promised = sorted(((one.pp * most(one), one) for one in every), key=lambda x: -x[0])
    best: StepReport | None = None
    asked, deep = 0, 0
    for depth, one in slow_progress(promised, "recording layouts"):
        if depth <= deep:
            break
        found: dict[int, StepReport] = {}

        def fit(blocks: int, one: Layout = one, found: dict[int, StepReport] = found) -> bool:
            found[blocks] = report(_deep(sizes, one, blocks), one)
            return found[blocks].peak_bytes <= budget_bytes

        blocks, asked = _halved(fit, depth // one.pp), asked + 1
        if one.pp * blocks > deep:
            best, deep = found[blocks], one.pp * blocks
    return Fit(best, budget_bytes, len(promised) - asked) if best else None


def _deep(sizes: Sizes, one: Layout, blocks: int) -> Sizes:
    """The model with so many blocks on each stage."""
    return replace(sizes, depth=one.pp * blocks)


def _sum(sizes: Sizes, one: Layout, global_batch: int) -> float:
    return sum(least_bytes(sizes, one, global_batch).values())


def _halved(fits: Callable[[int], bool], most: int = 1 << 20) -> int:
    """The largest number up to `most` that fits, where each below it does, too; 0 if none."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, min(2 * high, most) if high < most else most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
