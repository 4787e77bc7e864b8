"""The host, which launches every operation, and whom the device waits for where it is slower.

    host      │launch│launch│launch│launch│ ...          it does not wait for the device
    device        [op]   [ op  ]  [op]                   small operations: it waits for launches
    device           [   op   ][    op    ][  op   ] ...  large ones: launches are there before

The forward of a layer, or its backward, takes as long as the slower of the two: what the device
takes with its wires, or every launch, one after the other. A host runs ahead within it, and not
from one into the next: over a whole step a slow forward would be hidden behind a long backward,
and steps that were measured do not say so (calibrate.py). Models of a width of 1,024 and short
micro-batches are held up by their host; models of billions of parameters never are.
"""

from labkit.clusters import Cluster


def late_s(launches: int, device_s: float, cluster: Cluster) -> float:
    """How much longer the host takes for so many launches than the device for what it launches."""
    return max(launches * cluster.device.host_s - device_s, 0.0)
