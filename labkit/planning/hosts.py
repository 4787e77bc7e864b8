"""The host, which launches every operation, as a clock of its own.

    host      │launch│launch│launch│launch│ ...          it does not wait for the device
    device        [op]   [ op  ]  [op]                   small operations: it waits for launches
    device           [   op   ][    op    ][  op   ] ...  large ones: launches are there before

Over a whole step the slower of the two counts: what the device takes with all its wires, or every
launch, one after the other, through the same schedule. Models of a width of 1,024 and short
micro-batches are held up by their host; models of billions of parameters never are.
"""

from labkit.clusters import Cluster
from labkit.events import CommEvent
from labkit.replaying.costs import Costs, Sending
from labkit.trace import Operation

AT_ONCE = Sending(0.0, 0.0, "", "")


class HostCosts(Costs):
    """Launches alone: each operation takes `host_s`, what travels takes nothing."""

    def compute_s(self, operation: Operation) -> float:
        return self.cluster.device.host_s

    def sending(self, event: CommEvent) -> Sending:
        return AT_ONCE

    def collective(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> Sending:
        return AT_ONCE


def costs_of(cluster: Cluster) -> tuple[Costs, ...]:
    """Of the device, and of the host, where the cluster tells what that takes to launch."""
    device = (Costs(cluster),)
    return (*device, HostCosts(cluster)) if cluster.device.host_s else device
