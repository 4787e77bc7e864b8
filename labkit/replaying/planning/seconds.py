"""What a recorded layer takes on a cluster.

    host        │launch│launch│launch│ ...     it does not wait for the device
    computing          ███    ████████████     one operation after the other, at the device's rates,
                                               and none before it was launched
    wire                 [all-reduce of dx]    one collective after the other, on the ranks of tp
    exposed                            ▒▒▒     the rank stands still for it

All ranks of a tensor-parallel group do the same at the same time. So one rank tells it all, and a
layer begins and ends with nothing under way: the seconds of layers add up.

Small operations wait for their launches, large ones find them there. A host runs ahead within the
forward of a layer, or its backward, and not into the next: over a whole step, it would hide a slow
forward behind a long backward, and steps that were measured do not say so (calibrate.py). Models of
a width of 1,024 and short micro-batches are held up by their host; models of billions of parameters
never are. Where a cluster does not tell what its hosts take (`host_s`), they take nothing.

`Costs` says what an operation and a collective take; a subclass with other constants goes as well.
What was worked out for one `Costs` is kept as long as it lives.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from labkit.replaying.costs import Costs, Sending
from labkit.replaying.planning.layers import Layer, LayerPass, Shape, recorded
from labkit.replaying.planning.updates import recorded_update

Ranks = tuple[int, ...]
_known: "WeakKeyDictionary[Costs, dict[Any, Any]]" = WeakKeyDictionary()


class PassSeconds(NamedTuple):
    """`compute_s`: with the waits for launches. `gradients`: when backward was done with a
    parameter, and of how many elements it is."""

    compute_s: float
    exposed_s: float
    gradients: tuple[tuple[float, int], ...] = ()

    @property
    def sum_s(self) -> float:
        return self.compute_s + self.exposed_s


class LayerSeconds(NamedTuple):
    forward: PassSeconds
    backward: PassSeconds


def layer_seconds(shape: Shape, costs: Costs, groups: tuple[Ranks, ...]) -> LayerSeconds:
    """Of the layer of this shape. `groups`: where ranks stand that share a layer, one group of each
    kind of place; the slowest counts."""

    def find() -> LayerSeconds:
        layer = recorded(shape)
        found = [_pass_seconds(one, costs, groups) for one in (layer.forward, layer.backward)]
        return LayerSeconds(*found)

    return kept(costs, (shape, groups), find)


def update_seconds(layer: Layer, costs: Costs, shares: int = 1) -> float:
    """Of the optimizer's step on a layer, or on one of so many shares of it: AdamW treats each
    element by itself."""
    parameters = tuple(layer.gradients)

    def find() -> float:
        ended_s = 0.0
        for count, one in enumerate(recorded_update(parameters).operations, 1):
            launched_s = count * costs.cluster.device.host_s
            takes_s = costs.compute_s(one._replace(moved_bytes=one.moved_bytes // shares))
            ended_s = max(ended_s, launched_s) + takes_s
        return ended_s

    return kept(costs, ("update", parameters, shares), find)


def slowest(op: str, nbytes: int, costs: Costs, groups: tuple[Ranks, ...]) -> Sending:
    """A collective, on that of the groups where it takes longest."""
    every = (costs.collective(op, nbytes, ranks) for ranks in groups)
    return max(every, key=lambda one: one.seconds + one.latency_s)


def _pass_seconds(phase: LayerPass, costs: Costs, groups: tuple[Ranks, ...]) -> PassSeconds:
    compute_s = exposed_s = free_s = launched_s = 0.0
    over_s: dict[int, float] = {}
    gradients = []
    for what, of in phase.parts:
        now_s = compute_s + exposed_s
        if what == "compute":
            launched_s += costs.cluster.device.host_s
            compute_s = max(compute_s, launched_s - exposed_s) + costs.compute_s(of)
        elif what == "issue":
            one = slowest(of.op, of.payload_bytes, costs, groups)
            free_s = max(now_s, free_s) + one.seconds
            over_s[id(of)] = free_s + one.latency_s
        elif what == "wait":
            exposed_s += max(over_s[id(of)] - now_s, 0.0)
        else:
            gradients.append((now_s, of))
    return PassSeconds(compute_s, exposed_s, tuple(gradients))


def kept(costs: Costs, key: Any, find: Callable[[], Any]) -> Any:
    """What was found for these costs under `key` before; else it is found now."""
    known = _known.setdefault(costs, {})
    if key not in known:
        known[key] = find()
    return known[key]
