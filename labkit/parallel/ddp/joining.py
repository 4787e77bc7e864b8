"""Joining: ranks whose data ends early keep the others company until all are through.

    rank 0   step 0 | step 1 | join: . . . . . . . . . . . . | model
    rank 1   step 0 | step 1 | step 2 | step 3 | join: . . . | model
    rank 2   step 0 | step 1 | step 2 | step 3 | step 4      | model ->

Collectives need all ranks. So before each collective an active rank announces its phase, and a
joined rank that it is done: one all-reduce of a number for each rank. While any rank is active, the
joined ranks take part in the same collectives, as ranks that used no parameter: they change no sum.
In the end all have the model of a rank that was active last.

Source: torch's `Join`, of which this is the part that data parallelism needs.
"""

from enum import IntEnum

import torch

from labkit.comm import Comm


class Phase(IntEnum):
    """What a rank is about to do."""

    DONE = 0
    FORWARD = 1  # in which buffers are broadcast
    BACKWARD = 2


class JoinCoordinator:
    """Knows which ranks are active: those of the last announcement, all to begin with."""

    def __init__(self, comm: Comm, device: torch.device, divide_by_active: bool):
        self.comm, self.divide_by_active = comm, divide_by_active
        self.active = list(range(comm.size))
        self._device = device

    def announce(self, phase: Phase) -> Phase:
        """Announce this rank's phase; returns that of the active ranks, DONE if there are none.
        Raises ValueError on every rank when they differ."""
        numbers = torch.zeros(self.comm.size, device=self._device)
        numbers[self.comm.rank] = phase
        self.comm.all_reduce(numbers)
        phases = {rank: Phase(int(x)) for rank, x in enumerate(numbers.tolist()) if x}
        if len(set(phases.values())) > 1:
            raise ValueError(
                "inside join() the active ranks call forward and backward alike; now "
                + ", ".join(f"rank {rank} is in {x.name.lower()}" for rank, x in phases.items())
            )
        if phases:
            self.active = list(phases)
        return next(iter(phases.values()), Phase.DONE)

    @property
    def first(self) -> int:
        """An active rank, for all the same: it has what joined ranks no longer have."""
        return self.active[0]

    @property
    def is_active(self) -> bool:
        return self.comm.rank in self.active

    @property
    def divisor(self) -> int:
        """By what gradients are divided."""
        return len(self.active) if self.divide_by_active else self.comm.size
