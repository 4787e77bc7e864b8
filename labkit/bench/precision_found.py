"""What `labkit bench precision` has found: a table for the terminal, and a small file to keep."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from rich.table import Table

from labkit.bench.data_parallel import Contest
from labkit.foreign import write_json
from labkit.predict import mfu, step_flops

# Operations a second, dense. NVIDIA H100 architecture whitepaper (SXM5; the H200 has its cores),
# NVIDIA A100 datasheet.
_H100 = {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12}
_A100 = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
PEAK_FLOPS_PER_S = {
    "NVIDIA H200": _H100,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
}


CONTESTS = [
    Contest("bf16", "torch.amp bf16", 1.05),
    Contest("fp16", "torch.amp fp16", 1.05),
    Contest("recompute", "torch checkpoint", 1.05),
]


@dataclass(frozen=True)
class Sizes:
    """The model, and the batch of a step."""

    vocab: int
    width: int
    depth: int
    heads: int
    length: int
    rows: int


@dataclass(frozen=True)
class Steps:
    """What was measured: of each case the seconds of a step, one entry a turn, and peak bytes."""

    about: dict[str, str]
    sizes: Sizes
    seconds: dict[str, list[float]]
    peak_bytes: dict[str, int]

    def ms(self, name: str) -> float:
        """Milliseconds of a step, median over the turns."""
        return median(self.seconds[name]) * 1e3

    def ratio(self, ours: str, theirs: str) -> tuple[float, float, float]:
        """Ours to theirs in the same turn: lower quartile, median, upper quartile."""
        pairs = zip(self.seconds[ours], self.seconds[theirs], strict=True)
        low, middle, high = quantiles([a / b for a, b in pairs], n=4)
        return low, middle, high

    def mfu(self, name: str) -> float | None:
        """Of a format on a GPU whose peak is known; what is computed twice does not count."""
        peaks = PEAK_FLOPS_PER_S.get(self.about["device"], {})
        peak = peaks.get(name.removeprefix("torch.amp "))
        if peak is None:
            return None
        s = self.sizes
        flops = step_flops(s.vocab, s.width, s.depth, s.heads, s.rows, s.length)
        return mfu(flops, self.ms(name) / 1e3, peak)

    def save(self, path: str | Path) -> Path:
        """Write all of it as JSON."""
        cases = {
            name: {
                "step_s": self.seconds[name],
                "median_step_ms": self.ms(name),
                "peak_bytes": self.peak_bytes[name],
                "mfu": self.mfu(name),
            }
            for name in self.seconds
        }
        ratios = {
            f"{one.ours} / {one.theirs}": {
                "quartiles": self.ratio(one.ours, one.theirs),
                "aim": one.aim,
            }
            for one in contests(self.seconds)
        }
        told = {"about": self.about, "sizes": asdict(self.sizes), "cases": cases, "ratios": ratios}
        return write_json(path, told)


def contests(names: Iterable[str]) -> list[Contest]:
    """Those of which both sides are among the names."""
    return [one for one in CONTESTS if one.ours in names and one.theirs in names]


def table(found: Steps) -> Table:
    """What `bench_precision` found: a row for each case, its ratio and aim where it has a peer."""
    s, first = found.sizes, next(iter(found.seconds))
    peers = ", ".join(f"{one.ours} to {one.theirs}" for one in contests(found.seconds))
    shown = Table(
        title=f"A step of a GPT of {s.depth} x {s.width}, {s.rows} x {s.length} tokens, "
        f"on {found.about['device']}",
        caption=f"Peak: {found.about['peak']}. MFU: of the format's peak, where that is known. "
        f"Ratio: median and quartiles of the turns, {peers}.",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for name in ("case", "ms", f"/ {first}", "peak MB", "MFU", "ratio", "", "aim"):
        shown.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for name in found.seconds:
        row = [name, f"{found.ms(name):.1f}", f"{found.ratio(name, first)[1]:.2f}"]
        share = found.mfu(name)
        row += [f"{found.peak_bytes[name] / 1e6:.1f}", "" if share is None else f"{share:.1%}"]
        for one in contests(found.seconds):
            if one.ours == name:
                low, middle, high = found.ratio(one.ours, one.theirs)
                row += [f"{middle:.2f}", f"{low:.2f}-{high:.2f}", f"{one.aim:.2f}"]
        shown.add_row(*row)
    return shown
