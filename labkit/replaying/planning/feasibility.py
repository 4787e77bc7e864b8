"""Does a model fit, and what is the largest that does?

    lower bound   model states of the fullest stage, and what its micro-batches keep: formulas
                  without temporary tensors, which never overestimate
    exactly       the peak of a recorded step: `StepReport.memory_bytes`

The bounds cost nothing and rule out most layouts that do not fit; recordings decide on the rest.
The layout with the lowest peak is found likewise: in the order of the bounds, until the next bound
exceeds the lowest recorded peak.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from labkit.predict.activations import activation_terms
from labkit.predict.pipelines import interleaved
from labkit.predict.states import MIXED_ADAM
from labkit.predict.tables import Table
from labkit.replaying.planning.layout import Layout, Sizes, described
from labkit.replaying.planning.report import GB, StepReport
from labkit.runtime.progress import slow_progress

DROPOUT_MASKS = "dropout: two masks"  # a step at scale is recorded without dropout

Report = Callable[[Sizes, Layout], StepReport]


@dataclass(frozen=True)
class TooLarge:
    """A layout that does not fit. `at_least`: these bytes are the lower bound."""

    layout: Layout
    memory_bytes: Mapping[str, float]
    at_least: bool = False

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True)
class Fit:
    """The answer, and its layout: the one with the lowest peak, or in which the largest model fits.

    Attributes:
        others: layouts that their bounds ruled out without a recording.
    """

    report: StepReport
    budget_bytes: float
    others: int = 0

    @property
    def fits(self) -> bool:
        return self.report.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        sizes, layout = self.report.sizes, self.report.layout
        held, budget = self.report.peak_bytes / GB, self.budget_bytes / GB
        model = (
            f"{sizes.parameters / 1e9:,.1f}B parameters ({sizes.depth} blocks of width "
            f"{sizes.width}) on {layout.ranks} device{'s' * (layout.ranks > 1)}"
        )
        if self.fits:
            return f"{model}: fits, as {described(layout)}, with {held:.1f} GB of {budget:.1f} GB"
        return (
            f"{model}: does not fit; {described(layout)} holds the least, {held:.1f} GB of "
            f"{budget:.1f} GB, {held - budget:.1f} GB too much"
        )

    def table(self) -> Table:
        """What the fullest stage holds at its peak, by category."""
        free = self.budget_bytes - self.report.peak_bytes
        parts = {name: held for name, held in self.report.memory_bytes.items() if held}
        parts["free" if free >= 0 else "too much"] = abs(free)
        rows: list[tuple[str, ...]] = [
            (name, f"{nbytes / GB:.2f}", f"{nbytes / self.budget_bytes:.1%}", "")
            for name, nbytes in parts.items()
        ]
        return Table(("at the peak", "GB", "of a device", ""), rows)

    def _repr_html_(self) -> str:
        return f"<p>{self}</p>{self.table()._repr_html_()}"


def least_bytes(sizes: Sizes, layout: Layout, global_batch: int) -> dict[str, float]:
    """A lower bound of the first stage's peak, in bytes by category.

    Parameters and gradients of 2 bytes, Adam's states and master copies of 12 (arXiv 1910.02054),
    of the weight matrices alone; what its blocks keep for the micro-batches in flight (arXiv
    2205.05198), without dropout and with attention that stores no scores.
    """
    width, tp = sizes.width, layout.tp
    blocks = sizes.depth // layout.pp
    elements = (12 * width**2 * blocks + sizes.vocab * width) / tp
    terms = activation_terms(
        sizes.context, layout.microbatch, width, sizes.heads, tp, layout.sequence,
        "full" if layout.recompute == "full" else "selective",
    )  # fmt: skip
    kept = sum(held for name, held in terms.items() if name != DROPOUT_MASKS)
    count = layout.microbatches(global_batch)
    in_flight = interleaved(layout.pp, count, 1, 2, layout.chunks).peak_microbatches
    return {
        "parameters": elements * MIXED_ADAM.parameter,
        "gradients": elements * MIXED_ADAM.gradient,
        "optimizer state": elements * MIXED_ADAM.optimizer / layout.shards,
        "activations": kept * blocks * in_flight,
    }


def by_bound(every: Iterable[Layout], sizes: Sizes, global_batch: int) -> list[TooLarge]:
    """The layouts with their lower bounds, the smallest first."""
    bounds = [TooLarge(one, least_bytes(sizes, one, global_batch), True) for one in every]
    return sorted(bounds, key=lambda bound: bound.peak_bytes)


def lowest_peak(
    every: Iterable[Layout], sizes: Sizes, global_batch: int, budget_bytes: float, report: Report
) -> Fit:
    """The layout with the lowest recorded peak."""
    bounds = by_bound(every, sizes, global_batch)
    best, recorded = report(sizes, bounds[0].layout), 1
    for bound in slow_progress(bounds[1:], "recording layouts"):
        if bound.peak_bytes >= best.peak_bytes:
            break
        best = min(best, report(sizes, bound.layout), key=lambda found: found.peak_bytes)
        recorded += 1
    return Fit(best, budget_bytes, len(bounds) - recorded)


def deepest(
    every: Sequence[Layout], sizes: Sizes, global_batch: int, budget_bytes: float, report: Report
) -> Fit | None:
    """The most blocks of this width, over all these layouts; None if one block a stage is too much.

    More blocks on a stage need more memory, so the most of one layout is found by bisection. A
    layout whose bound allows no more than what was found already is not recorded."""

    def bound(one: Layout) -> int:
        """Blocks a stage that the formulas allow."""

        def allowed(blocks: int) -> bool:
            held = least_bytes(replace(sizes, depth=one.pp * blocks), one, global_batch)
            return sum(held.values()) <= budget_bytes

        return _bisect(allowed)

    bounds = sorted(((one.pp * bound(one), one) for one in every), key=lambda x: -x[0])
    best: StepReport | None = None
    recorded, deepest_so_far = 0, 0
    for depth, one in slow_progress(bounds, "recording layouts"):
        if depth <= deepest_so_far:
            break
        found: dict[int, StepReport] = {}

        def fit(blocks: int, one: Layout = one, found: dict[int, StepReport] = found) -> bool:
            found[blocks] = report(replace(sizes, depth=one.pp * blocks), one)
            return found[blocks].peak_bytes <= budget_bytes

        blocks, recorded = _bisect(fit, depth // one.pp), recorded + 1
        if one.pp * blocks > deepest_so_far:
            best, deepest_so_far = found[blocks], one.pp * blocks
    return Fit(best, budget_bytes, len(bounds) - recorded) if best else None


def _bisect(fits: Callable[[int], bool], most: int = 1 << 20) -> int:
    """The largest number up to `most` that fits, where each smaller one does too; 0 if none."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, min(2 * high, most) if high < most else most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
