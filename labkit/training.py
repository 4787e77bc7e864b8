"""One training run of a small GPT, on ranks of a `World` or under torchrun, and its report."""

import math
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch

from labkit.comm import listen
from labkit.data import Text
from labkit.holdings import Footprint
from labkit.models import GPT
from labkit.models.gpt import PRESETS
from labkit.parallel.common.held import held
from labkit.parallel.common.sharder import full_state_dict
from labkit.parallel.pipeline.p2p import TAGS
from labkit.recipes import recipe
from labkit.runtime.attach import attach
from labkit.runtime.progress import progress
from labkit.trace.recording import metric

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Task:
    """A training task, the same for every strategy. `rows` is the global batch size."""

    model: str = "1M"
    steps: int = 24
    rows: int = 16
    length: int = 64
    dtype: str = "float64"
    lr: float = 1e-3
    seed: int = 0
    text: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.model not in PRESETS:
            raise ValueError(f"model={self.model!r}: choose one of {', '.join(PRESETS)}")
        if self.text is not None and not Path(self.text).exists():
            raise ValueError(f"text={self.text!r}: no such file or folder; check the path")
        for name, most in (("steps", 10**9), ("rows", 1 << 16), ("length", 1 << 16)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}: choose 1 to {most:,}")
        if not (0 <= self.lr < math.inf and 0 <= self.seed < 1 << 63):
            raise ValueError(f"lr={self.lr}, seed={self.seed}: choose finite values of 0 or more")


@dataclass(frozen=True)
class Report:
    """The measurements of a training run on one rank."""

    strategy: str
    losses: list[float]  # of this rank's share; the mean over ranks is the global loss
    step_s: float  # median over steps
    predicted: Footprint
    measured: Footprint  # bus_bytes: mean over steps, without the shapes, which are sent once
    weights: dict[str, torch.Tensor] = field(repr=False, default_factory=dict)


def train(strategy: str, task: Task, keep_weights: bool = True) -> Report:
    """Train on this rank and return the report. Every rank must call this function."""
    me = attach()
    comm = me.comm
    chosen = recipe(strategy)
    text = Text(task.text, tokens="bpe")
    torch.manual_seed(task.seed)  # the same model on every rank
    model = GPT.preset(task.model, vocab=text.vocab, context=max(task.length, 16))
    model = model.to(DTYPES[task.dtype]).to(me.device)
    predicted = chosen.footprint(model, comm.size, task.rows * task.length)
    wrapped, optimizer = chosen.build(model, comm, task.lr)

    def one_step(step: int) -> float:
        batch = text.batch(step, task.rows, task.length, task.seed)
        batch = chosen.share(batch, comm).to(me.device)
        optimizer.zero_grad()
        value = chosen.step(wrapped, batch, comm)
        optimizer.step()
        return value.item()

    losses, seconds, sent_bytes = [], [], 0
    for step in progress(range(task.steps), strategy):
        with listen() as events:
            began_s = time.perf_counter()
            losses.append(one_step(step))
            metric(step=step, loss=losses[-1])
            seconds.append(time.perf_counter() - began_s)
        sent_bytes += sum(event.bus_bytes for event in events if event.tag != TAGS["meta"])
    gather = getattr(wrapped, "full_state_dict", partial(full_state_dict, model))
    weights = {name: x.detach().cpu() for name, x in (gather() if keep_weights else {}).items()}
    measured = held(wrapped, optimizer, sent_bytes / task.steps)
    return Report(strategy, losses, median(seconds), predicted, measured, weights)
