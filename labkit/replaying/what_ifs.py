"""`what_if`: a recorded run replayed on a cluster, with bandwidth and latency sliders."""

from collections.abc import Callable, Iterable, Mapping
from html import escape
from itertools import product
from typing import Any

from labkit.clusters import Cluster
from labkit.plot.widgets import PictureWidget, ipywidgets
from labkit.replaying.redrawing import Redrawing, changed, in_words
from labkit.runtime.progress import progress
from labkit.trace import Trace

GB_PER_S, US = 1e9, 1e-6
LINKS = {  # argument of `changed`: slider label, unit, range in powers of ten
    "inside_bytes_per_s": ("inside a node, GB/s", GB_PER_S, (-2.0, 4.0)),
    "inside_latency_s": ("latency inside, µs", US, (-1.0, 5.0)),
    "between_bytes_per_s": ("between nodes, GB/s", GB_PER_S, (-2.0, 4.0)),
    "between_latency_s": ("latency between, µs", US, (-1.0, 5.0)),
}
POWERS_PER_STEP = 0.05  # 20 steps of a slider are a factor of 10

Recorded = Trace | Callable[..., Trace]


def what_if(
    recorded: Recorded, cluster: Cluster, ranks: int = 8, **choices: Iterable[Any]
) -> "WhatIf":
    """A replay with sliders for bandwidth, latency, devices per node, and your own choices.

    Args:
        recorded: a trace with operations (`dry_run`), or a function that records a trace.
        ranks: the number of ranks to draw; every rank is replayed.
        choices: arguments of the function `recorded`, each with a list of values. All combinations
            are recorded at the start; moving a slider only replays and redraws.

    Raises ValueError for choices without a function or without values, and for a trace that cannot
    be replayed; ImportError if ipywidgets is missing.

    >>> what_if(dry_run(train, ranks=8), cluster("dgx-h100"))
    >>> what_if(lambda mb: dry_run(train, mb, ranks=8), cluster("dgx-h100"), mb=(1, 5, 25))
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: draw at least one rank")
    values = {}
    for name, given in choices.items():
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ValueError(f"{name}={given!r}: pass values to choose from, e.g. {name}=(1, 5)")
        values[name] = list(dict.fromkeys(given))
        if not values[name]:
            raise ValueError(f"{name} has no values to choose from; pass some, e.g. {name}=(1, 5)")
    return WhatIf(_recordings(recorded, values), values, cluster, ranks)


def _recordings(
    recorded: Recorded, choices: Mapping[str, list[Any]]
) -> dict[tuple[Any, ...], Trace]:
    if isinstance(recorded, Trace):
        if choices:
            raise ValueError(
                f"{', '.join(choices)}: a recorded trace has no choices; pass a function that "
                "records one, e.g. lambda bucket_mb: dry_run(train, bucket_mb, ranks=8)"
            )
        _check_counted(recorded, "this trace")
        return {(): recorded}
    if not callable(recorded):
        raise ValueError(f"what_if of {recorded!r}: pass a trace, or a function that records one")
    traces = {}
    for chosen in progress(list(product(*choices.values())), "record"):
        named = dict(zip(choices, chosen, strict=True))
        traces[chosen] = recorded(**named)
        values = " with " * bool(named) + ", ".join(f"{name}={x!r}" for name, x in named.items())
        _check_counted(traces[chosen], f"the recording{values}")
    return traces


def _check_counted(trace: Any, what: str) -> None:
    if not isinstance(trace, Trace):
        raise ValueError(
            f"{what} has type {type(trace).__name__}, not Trace; record it with dry_run"
        )
    if not any(rank.operations for rank in trace.ranks.values()):
        raise ValueError(
            f"{what} has no counted operations (replayed traces have none), so it cannot be "
            "replayed; record it with dry_run or record(detail_step=1)"
        )


class WhatIf(PictureWidget):
    """Sliders above the timeline of a replay; `line` shows the split of the step time."""

    def __init__(
        self,
        recordings: Mapping[tuple[Any, ...], Trace],
        choices: Mapping[str, list[Any]],
        cluster: Cluster,
        ranks: int,
    ):
        super().__init__()
        self._recordings, self._cluster = recordings, cluster
        self._redrawing = Redrawing(ranks)
        self.links = {name: _link(name, cluster) for name in LINKS}
        size = max(trace.size for trace in recordings.values())
        per_node = min(cluster.devices_per_node, size)
        powers_of_2 = {1 << power for power in range(size.bit_length())}
        self.devices_per_node = _selection(
            "devices per node", sorted({per_node, *powers_of_2}), per_node
        )
        self.choices = {name: _selection(name, few, few[0]) for name, few in choices.items()}
        self._at_first = {name: slider.value for name, slider in self.links.items()}
        self._per_node_at_first, self._step_s_at_first = per_node, 0.0
        self.line = ipywidgets.HTML()
        links, others = [*self.links.values()], [self.devices_per_node, *self.choices.values()]
        self._arrange([*links, *others], links[:2], links[2:], others, below=[self.line])

    @property
    def recorded(self) -> Trace:
        """The trace recorded with the chosen values."""
        return self._recordings[tuple(slider.value for slider in self.choices.values())]

    @property
    def cluster(self) -> Cluster:
        """The cluster with the values of the sliders that were moved."""
        links = {
            name: slider.value * LINKS[name][1]
            for name, slider in self.links.items()
            if slider.value != self._at_first[name]
        }
        per_node = self.devices_per_node.value
        moved = None if per_node == self._per_node_at_first else per_node
        return changed(self._cluster, self.recorded.size, devices_per_node=moved, **links)

    def _draw(self) -> None:
        cluster = self.cluster
        for name in ("between_bytes_per_s", "between_latency_s"):
            self.links[name].disabled = cluster.nodes == 1
        self.picture.value, split = self._redrawing.draw(self.recorded, cluster)
        text = in_words(split, self.recorded, cluster)
        self._step_s_at_first = self._step_s_at_first or split.step_s
        if split.step_s != self._step_s_at_first:
            text += f"; {split.step_s / self._step_s_at_first:.3g} times as long as at first"
        self.line.value = escape(text)


def _link(name: str, cluster: Cluster) -> Any:
    """A logarithmic slider, initially at the cluster's value."""
    label, unit, (low, high) = LINKS[name]
    inside = name.startswith("inside") or cluster.between is None
    level = cluster.inside if inside else cluster.between
    value = getattr(level, name.partition("_")[2]) / unit
    return ipywidgets.FloatLogSlider(
        value=min(max(value, 10**low), 10**high), min=low, max=high, step=POWERS_PER_STEP,
        description=label, readout_format=",.3r", style={"description_width": "11em"},
        layout={"width": "34em"},
    )  # fmt: skip


def _selection(label: str, values: list[Any], value: Any) -> Any:
    return ipywidgets.SelectionSlider(
        options=[(str(x), x) for x in values], value=value, description=label,
        style={"description_width": "11em"}, layout={"width": "28em"},
    )  # fmt: skip
