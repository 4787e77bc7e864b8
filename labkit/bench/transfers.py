"""Ways to move a tensor between the memories of this machine, timed side by side and compared with
predictions. A paced bus simulates PCIe without a GPU. Lab 12 also draws results from other
machines, which are stored beside the labs.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from labkit.bench.harness import titled
from labkit.foreign import read_file, write_json
from labkit.memory.bus import Bus
from labkit.memory.timing import Measured, measure, rates_of
from labkit.memory.transfers import Rates, Transfer, short, ways

DTYPES = {short(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class TransferTimes:
    """Measured transfer times; `about` describes the device, torch, the date and the paced bus."""

    about: dict[str, Any]
    measured: list[Measured]

    @property
    def rates(self) -> Rates:
        """Rates per memory and bus, from single-part transfers (for a paced bus, as configured)."""
        return rates_of(self.measured, self.about["paced_gbps"])

    def save(self, path: str | Path) -> Path:
        """Write all measurements as JSON, for `read_transfers`."""
        rows = [
            {**vars(x.way), "dtype": short(x.way.dtype), "to": short(x.way.to)}
            | {"done_s": x.done_s, "returned_s": x.returned_s}
            for x in self.measured
        ]
        contents = {"about": self.about, "numel": self.measured[0].numel, "measured": rows}
        return write_json(path, contents)


def read_transfers(path: str | Path) -> TransferTimes:
    """Read a file written by `TransferTimes.save`. Raises ValueError for any other file."""
    try:
        contents = json.loads(read_file(path))
        measured = []
        for row in contents["measured"]:
            times = {name: row.pop(name) for name in ("done_s", "returned_s")}
            way = Transfer(**row | {name: DTYPES[row[name]] for name in ("dtype", "to")})
            measured.append(Measured(way, contents["numel"], **times))
        return TransferTimes(contents["about"], measured)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} was not saved by `labkit bench transfers`: {error!r}") from None


def bench_transfers(
    mb: float = 64.0, gbps: float = 16.0, turns: int = 9, to: str = "fp16"
) -> TransferTimes:
    """Time every way to move `mb` megabytes (1e6 bytes) of fp32 on this machine, to fp32 and to
    dtype `to`. Unless `gbps` is 0, this includes a paced bus of `gbps` Gbit/s.

    Raises ValueError for invalid sizes."""
    if not (4e-6 <= mb <= 4000 and turns >= 1 and 0 <= gbps <= 1e6):
        raise ValueError(
            f"{mb=}, {turns=}, {gbps=}: choose 0 < mb <= 4000, turns >= 1 and gbps >= 0"
        )
    numel = int(mb * 1e6 / 4)
    if to not in DTYPES or to == "fp32":
        raise ValueError(f'to={to!r}: choose "fp16" or "bf16"')
    bus = Bus(gbps) if gbps else None
    measured = measure(ways(bus, DTYPES[to]), numel, bus, turns)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    about = {
        "device": gpu or f"CPU, {os.cpu_count()} cores, no GPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
        "turns": turns,
        "paced_gbps": gbps,
    }
    return TransferTimes(about, measured)


def table(times: TransferTimes) -> Table:
    """One row per way; the fastest way for each source, target and pair of dtypes is bold."""
    numel, rates = times.measured[0].numel, times.rates
    words = ("from → to", "as", "cast", "memory", "call")
    shown = titled(
        f"{4 * numel / 1e6:g} MB of fp32 between memories, in ms: {times.about['device']}, "
        f"torch {times.about['torch']}, {times.about['date']}",
        "limit: bytes sent / measured bus bandwidth. returned: when the call "
        f"returned. paced: a bus of {times.about['paced_gbps']:g} Gbit/s, modeled.",
        (*words, "bus, MB", "limit", "predicted", "measured", "ratio", "returned"), words,
    )  # fmt: skip
    fastest = fastest_of(times.measured)
    for row, after in zip(times.measured, [*times.measured[1:], times.measured[-1]]):
        way = row.way
        on_bus_s = sum(rates.seconds(part) for part in way.parts(numel) if part.what == "bus")
        predicted_s = rates.predict_s(way, numel)
        shown.add_row(
            " → ".join(way.ends), short(way.to),
            "" if way.dtype == way.to else way.cast or "as torch",
            ("pinned" if way.pinned else "pageable") if way.over_host_bus else "",
            "non-blocking" if way.non_blocking else "", f"{way.bus_bytes(numel) / 1e6:g}",
            *(f"{x * 1e3:.2f}" for x in (on_bus_s, predicted_s, row.done_s)),
            f"{row.done_s / predicted_s:.2f}", f"{row.returned_s * 1e3:.2f}",
            style="bold" if row in fastest else None, end_section=way.ends != after.way.ends,
        )  # fmt: skip
    return shown


def fastest_of(measured: Sequence[Measured]) -> list[Measured]:
    """The fastest way for each source, target and pair of dtypes."""
    best: dict[tuple[Any, ...], Measured] = {}
    for x in sorted(measured, key=lambda x: x.done_s):
        best.setdefault((*x.way.ends, x.way.dtype, x.way.to), x)
    return list(best.values())
