"""Benchmark harness: cases alternate in turns, and each turn yields a ratio.

    turn 1   ddp, torch DDP, zero-1     each turn starts with a different case; if the machine
    turn 2   torch DDP, zero-1, ddp     slows down, all cases slow down
    turn 3   zero-1, ddp, torch DDP

`StepTimes` holds the samples of one configuration and its contests.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, TypeVar

import torch
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from labkit.data import Batch
from labkit.foreign import read_file, write_json
from labkit.models.gpt import PRESETS
from labkit.runtime.attach import Rank
from labkit.runtime.progress import progress
from labkit.runtime.world import World

Samples = TypeVar("Samples")
Heading = tuple[str, Callable[["StepTimes", "Contest"], str]]  # column title, cell function


@dataclass(frozen=True)
class Contest:
    """A step of `ours` should take at most `aim` times as long as a step of `theirs`."""

    ours: str
    theirs: str
    aim: float


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step for each case, one sample per turn. `about` describes the configuration;
    `figures` holds other measurements, by quantity and case."""

    about: dict[str, Any]
    seconds: dict[str, list[float]]
    contests: list[Contest] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def ms(self, case: str) -> float:
        """Median milliseconds per step over the turns."""
        return median(self.seconds[case]) * 1e3

    def ratio(self, ours: str, theirs: str, quantity: str = "") -> tuple[float, float, float]:
        """Ours divided by theirs in the same turn: lower quartile, median, upper quartile.
        `quantity` selects samples from `figures`."""
        samples = self.figures[quantity] if quantity else self.seconds
        pairs = zip(samples[ours], samples[theirs], strict=True)
        low, middle, high = quantiles([a / b for a, b in pairs], n=4)
        return low, middle, high


def random_batch(vocab: int, rows: int, length: int, device: torch.device | None = None) -> Batch:
    """Random tokens from the default generator: inputs and targets, [rows, length] each."""
    tokens = torch.randint(0, vocab, (rows, length + 1), device=device)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), rows * length)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over tokens: logits [rows, length, vocab], targets [rows, length]."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def take_turns(
    cases: Mapping[str, Callable[[], Samples]], turns: int, label: str = "", shuffled: bool = False
) -> dict[str, list[Samples]]:
    """Call each case once per turn; return its results by turn. `label` adds a progress bar.
    `shuffled`: vary the order, equally on all ranks, so that cached data varies, too."""
    names, samples = list(cases), {name: list[Samples]() for name in cases}
    for turn in progress(range(turns), label) if label else range(turns):
        first = turn % len(names)
        order = [*names[first:], *names[:first]]
        for name in Random(turn).sample(names, len(names)) if shuffled else order:
            samples[name].append(cases[name]())
    return samples


def sync_of(device: torch.device) -> Callable[[], object]:
    """A function that waits until the device has finished all work."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def device_name(device: torch.device) -> str:
    """The GPU's name, as torch reports it, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def seconds_of(
    step: Callable[[], object], count: int, before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> float:  # fmt: skip
    """Mean seconds per step of `count` consecutive steps, from the end of `before()` to the end of
    `after()`. Both calls may be rank barriers or GPU synchronizations."""
    before()
    began_s = time.perf_counter()
    for _ in range(count):
        step()
    after()
    return (time.perf_counter() - began_s) / count


def calls_in_a_turn(me: Rank, call: Callable[[], object], turn_s: float, most: int) -> int:
    """Number of calls (at most `most`) that fill `turn_s` on the slowest rank, for all ranks."""
    mean_s = seconds_of(call, 2, me.comm.barrier, sync_of(me.device))
    slowest_s = torch.tensor(mean_s, dtype=torch.float64, device=me.device)
    me.comm.all_reduce(slowest_s, op="max")
    return max(1, min(most, int(turn_s / float(slowest_s))))


def check_names(given: Iterable[str], known: Iterable[str], words: str) -> None:
    """Raise ValueError for the first unknown name, listing the known names."""
    names = list(known)
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"{words.format(unknown[0])}; choose one of {', '.join(names)}")


def on_worlds(
    measure: Callable[..., StepTimes], ranks: Sequence[int], models: Sequence[str],
    transport: str | None, *args: Any,
) -> list[StepTimes]:  # fmt: skip
    """Rank 0's `measure(model, *args)` for each model and number of ranks. torch uses gloo; labkit
    uses `transport`, by default `World`'s choice. Raises ValueError for an unknown preset."""
    check_names(models, PRESETS, "no model {!r}")
    measured = []
    for size in ranks:
        with World(size, check=False, transport=transport) as world:
            measured += [world.run(measure, model, *args)[0] for model in models]
    return measured


def titled(
    title: str, caption: str, names: Sequence[str], words: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
) -> Table:  # fmt: skip
    """A table with these columns and rows; the columns in `words` are left-aligned."""
    table = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left",
        box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False,
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name in words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def ratio_cells(times: StepTimes, contest: Contest) -> list[str]:
    """Cells for the median ratio, its quartiles, and the aim."""
    low, middle, high = times.ratio(contest.ours, contest.theirs)
    return [f"{middle:.2f}", f"{low:.2f}-{high:.2f}", f"{contest.aim:.2f}"]


def contest_table(
    measured: Sequence[StepTimes], title: str, caption: str, floor: Heading, *more: Heading
) -> Table:
    """One row per contest and configuration: the floor of the step time, both step times in ms,
    their ratio with quartiles and aim, and the columns in `more`."""
    columns = ("model", "ranks", floor[0], "labkit", "ms", "peer", "ms", "ratio", "", "aim")
    table = titled(title, caption, [*columns, *(name for name, _ in more)], ("labkit", "peer"))
    for times in measured:
        for contest in times.contests:
            table.add_row(
                times.about["model"], str(times.about["ranks"]), floor[1](times, contest),
                contest.ours, f"{times.ms(contest.ours):.1f}",
                contest.theirs, f"{times.ms(contest.theirs):.1f}",
                *ratio_cells(times, contest), *(cell(times, contest) for _, cell in more),
            )  # fmt: skip
        table.add_section()
    return table


def save(measured: Sequence[StepTimes], path: str | Path) -> Path:
    """Write all samples and ratios as JSON, for `read`."""
    steps = [
        asdict(times) | {"ratios": {x.ours: times.ratio(x.ours, x.theirs) for x in times.contests}}
        for times in measured
    ]
    about = {"torch": torch.__version__, "cores": os.cpu_count(), "date": f"{date.today()}"}
    return write_json(path, {"about": about, "steps": steps})


def read(path: str | Path) -> list[StepTimes]:
    """Read a file written by `save`. Raises ValueError for any other file."""
    try:
        measured = []
        for step in json.loads(read_file(path))["steps"]:
            about, seconds, figures = (dict(step[x]) for x in ("about", "seconds", "figures"))
            contests = [Contest(**contest) for contest in step["contests"]]
            measured.append(StepTimes(about, seconds, contests, figures))
        return measured
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} was not saved by `labkit bench NAME`: {error!r}") from None
