"""Is the replay right? A step of DDP over a modelled wire, predicted and measured.

Two worlds take turns. In one nothing slows the wires: what it records is how long this machine
computes, and how long it takes to move each tensor. A replay gives its steps the wires of a `Link`;
in the other world the ranks train over that `Link` themselves. Prediction and measurement are
compared turn by turn.
"""

import time
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any

from rich.table import Table

from labkit.bench.data_parallel import stepper
from labkit.clusters import Cluster, Device, Level
from labkit.comm import Link
from labkit.events import CommEvent
from labkit.parallel import DDP
from labkit.replaying.costs import Costs, Sending
from labkit.replaying.replays import replay
from labkit.runtime.attach import attach
from labkit.runtime.progress import progress
from labkit.runtime.world import World
from labkit.trace import Trace
from labkit.trace.recording import record

STEPS = 4  # in a turn
BUCKET_MB = 1.0
LINK = Link(gbps=0.5, latency_us=200)
NO_WIRE = Link(gbps=1e6)  # the same way through the code, without the delay
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # a preset, and what is changed in it
    "1M": ("1M", {}), "3.4M": ("3.4M", {}), "9.8M": ("3.4M", {"depth": 12})
}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, medians over the turns, and the ratio of the same turns."""

    ranks: int
    model: str
    computing_s: float  # without any communication
    predicted_s: float
    measured_s: float
    ratio: float  # predicted / measured
    low: float  # its quartiles
    high: float


def wires_of(link: Link, ranks: int) -> Cluster:
    """One node whose ranks are joined by such links. Of computing it says nothing: its device is
    for replays of measured computing."""
    level = Level("paced", link.gbps * 1e9 / 8, link.latency_us * 1e-6, ranks)
    device = Device("not described", {}, 1.0, 1.0, 0.0)
    return Cluster("paced", f"links of {link.gbps:g} Gbit/s", device, 1, ranks, level)


class AfterTheWire(Costs):
    """A modelled wire holds messages back; then the machine really moves them. So an operation
    takes what the wire takes, and what it took in a run without that wire: from when the last
    rank began, for whom the others waited, until it was over, in the mean of the ranks."""

    def __init__(self, cluster: Cluster, trace: Trace):
        super().__init__(cluster)
        self._own_s = {
            key: mean(x.ended_s for x in ranks.values()) - max(x.began_s for x in ranks.values())
            for key, ranks in trace.collectives().items()
        }

    def sending(self, event: CommEvent) -> Sending:
        on_wire = super().sending(event)
        return on_wire._replace(seconds=on_wire.seconds + self._own_s[event.group, event.seq])


def _begin(preset: str, changes: dict[str, Any]) -> None:
    """On a rank: a model, and its first steps."""
    me = attach()
    me.state.step = stepper(lambda x: DDP(x, bucket_mb=BUCKET_MB), preset, **changes)
    for _ in range(3):
        me.state.step()


def _steps() -> float:
    """On a rank: seconds of a step."""
    me = attach()
    me.comm.barrier()
    began_s = time.perf_counter()
    for _ in range(STEPS):
        me.state.step()
    me.comm.barrier()
    return (time.perf_counter() - began_s) / STEPS


def _step_s(trace: Trace) -> float:
    """Seconds of each of the STEPS, the mean of the ranks; with the barrier after the last, which
    is recorded as the beginning of one step more."""
    return mean(
        (one.steps[-1].ended_s - one.steps[0].began_s) / STEPS for one in trace.ranks.values()
    )


def bench_replay(
    models: tuple[str, ...] = tuple(MODELS), ranks: int = 2, turns: int = 10
) -> list[Prediction]:
    """Predict and measure, for each model."""
    found = []
    with (
        World(ranks, link=NO_WIRE, check=False) as fast,
        World(ranks, link=LINK, check=False) as paced,
    ):
        wires, none = wires_of(LINK, ranks), wires_of(NO_WIRE, ranks)
        for model in models:
            fast.run(_begin, *MODELS[model])
            paced.run(_begin, *MODELS[model])
            told: list[tuple[float, float, float]] = []
            for _ in progress(range(turns), f"{model} on {ranks} ranks"):
                with record() as trace:
                    fast.run(_steps)
                computing_s = _step_s(replay(trace, none, "measured"))
                predicted_s = _step_s(replay(trace, AfterTheWire(wires, trace), "measured"))
                told.append((computing_s, predicted_s, paced.run(_steps)[0]))
            computing_s, predicted_s, measured_s = (median(column) for column in zip(*told))
            low, middle, high = quantiles([x[1] / x[2] for x in told], n=4)
            found.append(
                Prediction(ranks, model, computing_s, predicted_s, measured_s, middle, low, high)
            )
    return found


def table(found: list[Prediction]) -> Table:
    """What `bench_replay` found."""
    shown = Table(
        title=f"A DDP step over {LINK.gbps:g} Gbit/s and {LINK.latency_us:g} us: replayed from a "
        "run without it, and measured (aim: 0.9 to 1.1)",
        title_justify="left",
    )
    for name in ("model", "ranks", "computing, ms", "replayed, ms", "measured, ms"):
        shown.add_column(name, justify="right")
    shown.add_column("replayed / measured", justify="right")
    shown.add_column("quartiles", justify="right")
    for one in found:
        times = (one.computing_s, one.predicted_s, one.measured_s)
        quartiles = f"{one.low:.2f} to {one.high:.2f}"
        ms = [f"{seconds * 1e3:.1f}" for seconds in times]
        shown.add_row(one.model, str(one.ranks), *ms, f"{one.ratio:.2f}", quartiles)
    return shown
