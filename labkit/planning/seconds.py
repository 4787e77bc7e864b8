"""What a recorded layer takes on a cluster.

    computing   ███████████    ████████        one operation after the other, at the device's rates
    wire                 [all-reduce of dx]    one collective after the other, on the ranks of tp
    exposed                            ▒▒▒     the rank stands still for it
    launching   ─────────────────────────────▶ and where its host takes longer, that counts (hosts.py)

All ranks of a tensor-parallel group do the same at the same time. So one rank tells it all, and a
layer begins and ends with nothing under way: the seconds of layers add up.

`Costs` says what an operation and a collective take; a subclass with other constants goes as well.
What was worked out for one `Costs` is kept as long as it lives.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from labkit.planning.hosts import late_s
from labkit.planning.layers import Layer, Phase, Shape, recorded
from labkit.planning.updates import recorded_update
from labkit.replaying.costs import Costs, Sending

Ranks = tuple[int, ...]
_known: "WeakKeyDictionary[Costs, dict[Any, Any]]" = WeakKeyDictionary()


class PhaseSeconds(NamedTuple):
    """`compute_s`: with what the device waits for its host. `gradients`: when backward was done
    with a parameter, and of how many elements it is."""

    compute_s: float
    exposed_s: float
    gradients: tuple[tuple[float, int], ...] = ()

    @property
    def sum_s(self) -> float:
        return self.compute_s + self.exposed_s


class LayerSeconds(NamedTuple):
    forward: PhaseSeconds
    backward: PhaseSeconds


def layer_seconds(shape: Shape, costs: Costs, groups: tuple[Ranks, ...]) -> LayerSeconds:
    """Of the layer of this shape. `groups`: where ranks stand that share a layer, one group of each
    kind of place; the slowest counts."""

    def find() -> LayerSeconds:
        layer = recorded(shape)
        found = [_phase_seconds(one, costs, groups) for one in (layer.forward, layer.backward)]
        return LayerSeconds(*found)

    return kept(costs, (shape, groups), find)


def update_seconds(layer: Layer, costs: Costs, shares: int = 1) -> float:
    """Of the optimizer's step on a layer, or on one of so many shares of it: AdamW treats each
    element by itself."""
    parameters = tuple(layer.gradients)

    def find() -> float:
        operations = recorded_update(parameters).operations
        device_s = sum(
            costs.compute_s(one._replace(moved_bytes=one.moved_bytes // shares))
            for one in operations
        )
        return device_s + late_s(len(operations), device_s, costs.cluster)

    return kept(costs, ("update", parameters, shares), find)


def slowest(op: str, nbytes: int, costs: Costs, groups: tuple[Ranks, ...]) -> Sending:
    """A collective, on that of the groups where it takes longest."""
    every = (costs.collective(op, nbytes, ranks) for ranks in groups)
    return max(every, key=lambda one: one.seconds + one.latency_s)


def _phase_seconds(phase: Phase, costs: Costs, groups: tuple[Ranks, ...]) -> PhaseSeconds:
    compute_s = exposed_s = free_s = 0.0
    over_s: dict[int, float] = {}
    launches, gradients = 0, []
    for what, of in phase.parts:
        now_s = compute_s + exposed_s
        if what == "compute":
            compute_s += costs.compute_s(of)
            launches += 1
        elif what == "issue":
            one = slowest(of.op, of.payload_bytes, costs, groups)
            free_s = max(now_s, free_s) + one.seconds
            over_s[id(of)] = free_s + one.latency_s
        elif what == "wait":
            exposed_s += max(over_s[id(of)] - now_s, 0.0)
        else:
            gradients.append((now_s, of))
    device_s = compute_s + exposed_s
    waited_s = late_s(launches, device_s, costs.cluster)
    if waited_s:
        gradients = [(when_s * (1 + waited_s / device_s), of) for when_s, of in gradients]
    return PhaseSeconds(compute_s + waited_s, exposed_s, tuple(gradients))


def kept(costs: Costs, key: Any, find: Callable[[], Any]) -> Any:
    """What was found for these costs under `key` before; else it is found now."""
    known = _known.setdefault(costs, {})
    if key not in known:
        known[key] = find()
    return known[key]
