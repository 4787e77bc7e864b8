"""Format ranges, values near zero, and the magnitudes of tensors compared with the range of a
dtype.

       becomes 0  │    subnormal   │            full precision            │ becomes inf
                  │          ▂▅▇█▇▅│▂                                     │
    ──────────────┴────────────────┴──────────────────────────────────────┴────────────
             2⁻²⁵             2⁻¹⁴                                      2¹⁶      (fp16)
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import log10
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.plot.figure import constrained, name_rows, open_rows, styled
from labkit.plot.style import BLUE, GRAY, INK, MUTED, ORANGE, SMALL_PT, VERMILION
from labkit.precision.formats import FORMATS, Format, decimal, floor_log2, format_of, rounded

NORMAL, SUBNORMAL = BLUE, ORANGE
ALL_10 = (-47.0, 41.0)  # exponents of ten on the axis, which covers the range of fp32
VALUES_10 = (-16.0, 7.0)  # with `values`: the range of fp16, extended to cover `values`
ROW_IN, VALUES_IN, NEAR_IN, AROUND_IN = 0.27, 1.3, 0.42, 0.55
MOST_VALUES = 2000

PANEL_IN, MARGIN_IN = 1.25, 0.75  # for `magnitudes`
MOST_BINS = 160

Formats = Sequence[Format | str]
Tensors = torch.Tensor | Iterable[torch.Tensor]


@styled
def number_line(
    formats: Formats = tuple(FORMATS),
    near_zero: Formats = ("e5m2", "e4m3"),
    upto: float = 2**-4,
    values: torch.Tensor | None = None,
    figure: Figure | None = None,
) -> Figure:
    """The range of each format on an axis of powers of ten and, below, values near zero.

    Args:
        formats: names or `Format`s to show in the upper part.
        near_zero: formats in the lower part, with a line per value from 0 to `upto`; can be ().
        values: a tensor, such as all gradients of a step. If given, a histogram of magnitudes above
            the ranges replaces the lower part; labels show the fraction that becomes zero.

    Raises ValueError if more than 2,000 values of a format would be drawn.
    """
    chosen = [format_of(format) for format in formats]
    near = [] if values is not None else [format_of(format) for format in near_zero]
    heights = [VALUES_IN] * (values is not None) + [ROW_IN * len(chosen)]
    heights += [NEAR_IN * len(near)] * bool(near)
    figure = constrained(figure, sum(heights) + AROUND_IN * (1 + len(heights)))
    panels = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    ends = ALL_10 if values is None else _histogram(panels[0], values)
    _ranges(panels[int(values is not None)], chosen, ends, values)
    if near:
        _near_zero(panels[-1], near, upto)
    return figure


def lost(values: torch.Tensor, format: Format) -> float:
    """The fraction of nonzero values that `format` rounds to zero."""
    some = values[values != 0]
    return float((rounded(some.float(), format) == 0).double().mean()) if len(some) else 0.0


def _ranges(
    axes: Axes, formats: list[Format], ends: tuple[float, float], values: torch.Tensor | None
) -> None:
    left, right = ends
    for row, format in enumerate(formats):
        smallest = log10(2) * floor_log2(format.smallest_subnormal)
        normal = log10(2) * format.min_exponent
        largest = log10(2) * (floor_log2(format.largest) + 1)
        for begin, end, color in ((smallest, normal, SUBNORMAL), (normal, largest, NORMAL)):
            begin, end = max(begin, left), min(end, right)
            if begin < end:
                axes.barh(row, end - begin, left=begin, height=0.62, color=color)
        arrow: dict[str, Any] = {"color": "white", "va": "center", "fontsize": SMALL_PT}
        if smallest < left:
            axes.text(left, row, "◀", ha="left", **arrow)
        if largest > right:
            axes.text(right, row, "▶", ha="right", **arrow)
        if values is not None:
            words = f"{lost(values, format):.1%} become zero"
        else:
            words = f"{decimal(format.smallest_subnormal, 2)} to {decimal(format.largest, 3)},  "
            words += f"{format.fraction_bits + 1} bits"
        axes.text(right + (right - left) / 60, row, words, va="center", fontsize=SMALL_PT)
    _name_formats(axes, formats)
    _powers_of_ten(axes, ends)
    axes.set_title("Range of each format")
    axes.legend(
        handles=[Patch(color=NORMAL, label="normal"), Patch(color=SUBNORMAL, label="subnormal")],
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.1,
        handlelength=1, fontsize=SMALL_PT,
    )  # fmt: skip


def _name_formats(axes: Axes, formats: list[Format]) -> None:
    name_rows(axes, [format.name for format in formats])
    axes.tick_params(axis="y", labelsize=SMALL_PT + 0.5)
    axes.spines["left"].set_visible(False)


def _powers_of_ten(axes: Axes, ends: tuple[float, float]) -> None:
    step = 10 if ends[1] - ends[0] > 40 else 5 if ends[1] - ends[0] > 26 else 2
    ticks = [tick for tick in range(-400, 400, step) if ends[0] <= tick <= ends[1]]
    axes.set_xlim(*ends)
    axes.set_xticks(ticks, [f"$10^{{{tick}}}$" for tick in ticks])
    axes.axvline(0, color=INK, linewidth=0.8, linestyle=":")


def _histogram(axes: Axes, values: torch.Tensor) -> tuple[float, float]:
    """Draw a histogram of magnitudes; return the axis limits as exponents of ten."""
    elements = _elements(values)
    zeros = int((elements == 0).sum())
    sizes = np.log10(np.abs(elements[np.isfinite(elements) & (elements != 0)]))
    low, high = VALUES_10
    if len(sizes):
        low, high = min(low, float(sizes.min()) - 1), max(high, float(sizes.max()) + 1)
    axes.hist(sizes, bins=np.arange(low, high, 0.25).tolist(), color=GRAY)
    axes.spines["left"].set_visible(False)
    _powers_of_ten(axes, (low, high))
    words = f"{len(elements):,} values by magnitude" + (f"; {zeros:,} are zero" if zeros else "")
    axes.set(yticks=[], title=words)
    return low, high


def _near_zero(axes: Axes, formats: list[Format], upto: float) -> None:
    """Draw one line per value for each format."""
    for row, format in enumerate(formats):
        last = format.rank(Fraction(upto)) if upto < format.largest else format.count // 2
        if last > MOST_VALUES:
            raise ValueError(
                f"number_line: {format.name} has {last + 1:,} values up to {upto:g}, and at most "
                f"{MOST_VALUES:,} are drawn; lower `upto`, or drop {format.name} from `near_zero`"
            )
        numbers = np.array([float(format.number(rank)) for rank in range(last + 1)])
        small = numbers < float(format.smallest_normal)
        for which, color in ((small, SUBNORMAL), (~small, NORMAL)):
            shown = numbers[which & (numbers <= upto)]
            axes.vlines(shown, row - 0.36, row + 0.36, colors=color, linewidths=1.1)
        words = f"subnormal below {decimal(format.smallest_normal, 2)}, in steps of "
        words += decimal(format.smallest_subnormal, 2)
        axes.text(upto * 1.015, row, words, va="center", fontsize=SMALL_PT)
    _name_formats(axes, formats)
    axes.set(xlim=(0, upto), title="Values near zero, one line per value")
    axes.set_xlabel("value", color=MUTED)


@styled
def magnitudes(named: Mapping[str, Tensors], dtype: torch.dtype = torch.float16) -> Figure:
    """Histograms of log2 |x|, one panel per entry of `named`, with the range of `dtype` marked.

    `named`: title -> one or more tensors (None is skipped). Titles show the share of zeros, and the
    shares that a cast turns into 0 or inf. Raises ValueError if `named` or an entry is empty.
    """
    elements = {name: _elements(tensors) for name, tensors in named.items()}
    empty = [name for name, x in elements.items() if not len(x)]
    if empty or not elements:
        which = f"{empty[0]!r} is empty" if empty else "pass at least one tensor by name"
        raise ValueError(f"magnitudes: no values to draw; {which}")
    limits = torch.finfo(dtype)
    normal = np.log2(limits.smallest_normal)
    marks = [normal + np.log2(limits.eps) - 1, normal, np.log2(limits.max)]
    logs = [np.log2(np.abs(x[np.isfinite(x) & (x != 0)])) for x in elements.values()]
    some = np.concatenate([*logs, marks])
    ends = [np.floor(some.min()) - 1, *marks, np.ceil(some.max()) + 6]
    zero, subnormal, _, over = pairwise(ends)
    figure = constrained(None, MARGIN_IN + PANEL_IN * len(named))
    panels = figure.subplots(len(named), 1, sharex=True, squeeze=False)[:, 0]
    bins = np.linspace(ends[0], ends[-1], min(MOST_BINS, int(ends[-1] - ends[0]) * 2) + 1)
    for axes, (name, x), log in zip(panels, elements.items(), logs):
        for part, alpha in ((zero, 0.25), (subnormal, 0.1), (over, 0.25)):
            axes.axvspan(*part, color=VERMILION, alpha=alpha, linewidth=0)
        axes.hist(log, bins=bins.tolist(), color=ORANGE)
        for mark in marks:
            axes.axvline(mark, color=MUTED, linewidth=0.8)
        axes.set(yticks=[], title=f"{name}:  {_shares(x, dtype)}")
        open_rows(axes)
    for part, text in ((zero, "becomes\n0"), (subnormal, "subnormal"), (over, "becomes\ninf")):
        panels[0].text(
            sum(part) / 2, 0.97, text, fontsize=SMALL_PT, ha="center", va="top",
            transform=panels[0].get_xaxis_transform(),
        )  # fmt: skip
    panels[-1].set_xlabel(f"log2 of the magnitude; marked: range of {str(dtype).partition('.')[2]}")
    panels[-1].set_xlim(ends[0], ends[-1])
    return figure


def _elements(tensors: Tensors) -> np.ndarray:
    some = [tensors] if isinstance(tensors, torch.Tensor) else [x for x in tensors if x is not None]
    flat = [x.detach().double().cpu().reshape(-1).numpy() for x in some]
    return np.concatenate(flat) if flat else np.empty(0)


def _shares(x: np.ndarray, dtype: torch.dtype) -> str:
    """The shares of values that a cast changes to 0 or inf, as text."""
    nonzero = x[x != 0]
    cast = torch.from_numpy(nonzero).to(dtype).double().numpy()
    under = np.mean(cast == 0) if len(nonzero) else 0.0
    words = [f"{under:.1%} become 0"]
    if over := np.mean(np.isfinite(nonzero) & ~np.isfinite(cast)) if len(nonzero) else 0.0:
        words.append(f"{over:.1%} become inf")
    if (zero := 1 - len(nonzero) / len(x)) >= 0.0005:
        words.append(f"{zero:.1%} are 0 already")
    return ", ".join(words)
