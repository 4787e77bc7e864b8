"""Replay accuracy, from two alternating worlds. In the first, messages are not delayed: a recording
contains this machine's compute times and the time to move each tensor, and a replay adds the delays
of a `Link`. In the second, the ranks train over that `Link`. Times are compared turn by turn.
"""

from collections.abc import Callable
from statistics import mean
from typing import Any

from rich.table import Table

from labkit.bench.data_parallel import stepper
from labkit.bench.harness import StepTimes, seconds_of, take_turns, titled
from labkit.clusters import Cluster, Device, Level
from labkit.comm import Link
from labkit.events import CommEvent
from labkit.parallel import DDP
from labkit.replaying.costs import Costs, Sending
from labkit.replaying.replays import replay
from labkit.runtime.attach import attach
from labkit.runtime.world import World
from labkit.trace import Trace
from labkit.trace.recording import record

STEPS = 4  # per turn
BUCKET_MB = 1.0
LINK = Link(gbps=0.5, latency_us=200)
UNPACED = Link(gbps=1e6)  # the same code path, without the delay
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # a preset, and changes to the preset
    "1M": ("1M", {}), "3.4M": ("3.4M", {}), "9.8M": ("3.4M", {"depth": 12})
}  # fmt: skip


def cluster_of(link: Link, ranks: int) -> Cluster:
    """One node with `link` between ranks, without device rates: replays use measured compute."""
    level = Level("paced", link.gbps * 1e9 / 8, link.latency_us * 1e-6, ranks)
    device = Device("not described", {}, 1.0, 1.0, 0.0)
    return Cluster("paced", f"links of {link.gbps:g} Gbit/s", device, 1, ranks, level)


class PacedCosts(Costs):
    """Costs of a modeled link, which delays a message before the machine moves it. An operation
    takes the link's time plus its unpaced time, which begins when the last rank starts (the others
    wait for it) and ends with the operation, averaged over the ranks."""

    def __init__(self, cluster: Cluster, trace: Trace):
        super().__init__(cluster)
        self._moving_s = {
            key: mean(x.ended_s for x in ranks.values()) - max(x.began_s for x in ranks.values())
            for key, ranks in trace.collectives().items()
        }

    def sending(self, event: CommEvent) -> Sending:
        on_link = super().sending(event)
        return on_link._replace(seconds=on_link.seconds + self._moving_s[event.group, event.seq])


def _begin(preset: str, changes: dict[str, Any]) -> None:
    """On a rank: build a model and run its first steps."""
    me = attach()
    me.state.step = stepper(lambda x: DDP(x, bucket_mb=BUCKET_MB), preset, **changes)
    for _ in range(3):
        me.state.step()


def _turn_s() -> float:
    """On a rank: seconds per step."""
    me = attach()
    return seconds_of(me.state.step, STEPS, me.comm.barrier, me.comm.barrier)


def _step_s(trace: Trace) -> float:
    """Mean seconds per step over the ranks, up to the barrier after the last step, which is
    recorded as the start of one more step."""
    ranks = trace.ranks.values()
    return mean((x.steps[-1].ended_s - x.steps[0].began_s) / STEPS for x in ranks)


def _replayed(world: World) -> tuple[float, float]:
    """Seconds per step of this world's run, without communication and replayed over `LINK`."""
    with record() as trace:
        world.run(_turn_s)
    without, paced = (cluster_of(link, world.size) for link in (UNPACED, LINK))
    predicted = replay(trace, PacedCosts(paced, trace), "measured")
    return _step_s(replay(trace, without, "measured")), _step_s(predicted)


def bench_replay(
    models: tuple[str, ...] = tuple(MODELS), ranks: int = 2, turns: int = 10
) -> list[StepTimes]:
    """Predict and measure each model; the cases are "computing", "replayed" and "measured"."""
    measured = []
    with (
        World(ranks, device="cpu", link=UNPACED, check=False) as fast,
        World(ranks, device="cpu", link=LINK, check=False) as paced,
    ):
        cases: dict[str, Callable[[], Any]] = {
            "replayed": lambda: _replayed(fast),
            "measured": lambda: paced.run(_turn_s)[0],
        }
        for model in models:
            for world in (fast, paced):
                world.run(_begin, *MODELS[model])
            seconds = take_turns(cases, turns, f"{model} on {ranks} ranks")
            computing, replayed = map(list, zip(*seconds["replayed"]))
            seconds |= {"computing": computing, "replayed": replayed}
            measured.append(StepTimes({"ranks": ranks, "model": model}, seconds))
    return measured


def table(measured: list[StepTimes]) -> Table:
    """One row per model: the times, and the ratio of replayed to measured time."""
    cases, rows = ("computing", "replayed", "measured"), []
    for times in measured:
        low, middle, high = times.ratio("replayed", "measured")
        about = times.about["model"], str(times.about["ranks"])
        ms = [f"{times.ms(case):.1f}" for case in cases]
        rows.append((*about, *ms, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"))
    title = (
        f"DDP step over {LINK.gbps:g} Gbit/s and {LINK.latency_us:g} us: replayed from an unpaced "
        "run, and measured (aim: 0.9 to 1.1)"
    )
    names = ("model", "ranks", *(f"{case}, ms" for case in cases))
    return titled(title, "", (*names, "replayed / measured", "quartiles"), (), rows)
