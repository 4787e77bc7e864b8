"""The magnitudes of tensors, over the range of a dtype.

       becomes 0  │  loses digits  │          as exact as it gets         │ becomes inf
                  │          ▂▅▇█▇▅│▂                                     │
    ──────────────┴────────────────┴──────────────────────────────────────┴────────────
             2⁻²⁵             2⁻¹⁴                                      2¹⁶      (fp16)

One panel for each entry, all on one axis: a loss scale moves the hill.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from matplotlib.axes import Axes

from labkit.plot.figure import Picture, open_rows, styled
from labkit.plot.style import MUTED, ORANGE, SMALL_PT, VERMILION

PANEL_IN, MARGIN_IN = 1.25, 0.75
MOST_BINS = 160
Tensors = torch.Tensor | Iterable[torch.Tensor]


@styled
def magnitudes(named: Mapping[str, Tensors], dtype: torch.dtype = torch.float16) -> Picture:
    """Histograms of log2 |x| for each entry, with the range of `dtype` drawn.

    named: a tensor or several for each panel (None is left out). Numbers that are 0 already are
    counted apart; the shares come from a real cast. Raises ValueError for nothing to draw.
    """
    numbers = {name: _numbers(tensors) for name, tensors in named.items()}
    if not numbers or not all(len(x) for x in numbers.values()):
        empty = [name for name, x in numbers.items() if not len(x)]
        raise ValueError(f"there are no numbers to draw{': ' + ', '.join(empty) if empty else ''}")
    limits = torch.finfo(dtype)
    normal = np.log2(limits.smallest_normal)
    marks = [normal + np.log2(limits.eps) - 1, normal, np.log2(limits.max)]
    logs = {name: np.log2(np.abs(x[np.isfinite(x) & (x != 0)])) for name, x in numbers.items()}
    some = np.concatenate([*logs.values(), marks])
    low, high = np.floor(some.min()) - 1, np.ceil(some.max()) + 6
    picture = Picture(MARGIN_IN + PANEL_IN * len(named), layout="constrained")
    panels = picture.subplots(len(named), 1, sharex=True, squeeze=False)[:, 0]
    bins = np.linspace(low, high, min(MOST_BINS, int(high - low) * 2) + 1)
    for axes, (name, x) in zip(panels, numbers.items()):
        _draw(axes, logs[name], bins, marks)
        axes.set_title(f"{name}:  {_shares(x, dtype)}", loc="left")
    zero, normal, most = marks
    for begin, end, text in (
        (low, zero, "becomes\n0"), (zero, normal, "fewer\ndigits"), (most, high, "becomes\ninf"),
    ):  # fmt: skip
        panels[0].text(
            (begin + end) / 2, 0.97, text, fontsize=SMALL_PT, ha="center", va="top",
            transform=panels[0].get_xaxis_transform(),
        )  # fmt: skip
    panels[-1].set_xlabel(f"log2 of the magnitude; the range of {str(dtype).partition('.')[2]}")
    panels[-1].set_xlim(low, high)
    return picture


def _numbers(tensors: Tensors) -> np.ndarray:
    some = [tensors] if isinstance(tensors, torch.Tensor) else [x for x in tensors if x is not None]
    flat = [x.detach().double().cpu().reshape(-1).numpy() for x in some]
    return np.concatenate(flat) if flat else np.empty(0)


def _draw(axes: Axes, logs: np.ndarray, bins: np.ndarray, marks: list[float]) -> None:
    zero, normal, most = marks
    for begin, end, alpha in ((bins[0], zero, 0.25), (zero, normal, 0.1), (most, bins[-1], 0.25)):
        axes.axvspan(begin, end, color=VERMILION, alpha=alpha, linewidth=0)
    axes.hist(logs, bins=bins.tolist(), color=ORANGE)
    for mark in marks:
        axes.axvline(mark, color=MUTED, linewidth=0.8)
    axes.set_yticks([])
    open_rows(axes)


def _shares(x: np.ndarray, dtype: torch.dtype) -> str:
    """What a cast does to the numbers, in words."""
    nonzero = x[x != 0]
    cast = torch.from_numpy(nonzero).to(dtype).double().numpy()
    lost = np.mean(cast == 0) if len(nonzero) else 0.0
    words = [f"{lost:.1%} become 0"]
    if over := np.mean(np.isfinite(nonzero) & ~np.isfinite(cast)) if len(nonzero) else 0.0:
        words.append(f"{over:.1%} become inf")
    if (zero := 1 - len(nonzero) / len(x)) >= 0.0005:
        words.append(f"{zero:.1%} are 0 already")
    return ", ".join(words)
