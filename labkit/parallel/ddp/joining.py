"""Joining: ranks whose data ends early keep the others company until all are through.

    rank 0   step 0 | step 1 | join: . . . . . . . . . . . . | model
    rank 1   step 0 | step 1 | step 2 | step 3 | join: . . . | model
    rank 2   step 0 | step 1 | step 2 | step 3 | step 4      | model ->

Collectives need all ranks. So before each thing that all must do, an active rank tells that it is
about to do it, a joined rank that its data ended: one all-reduce of a number for each rank. If
anybody is still active, the joined rank does the same collectives, as a rank that used no
parameter: it changes no sum. In the end all have the model of a rank that was active last.

Source: torch's `Join`, of which this is the part that data parallelism needs.
"""

from enum import IntEnum

import torch

from labkit.comm import Comm


class Phase(IntEnum):
    """What a rank tells."""

    ENDED = 0
    FORWARD = 1  # in which buffers are broadcast
    BACKWARD = 2


class JoinCoordinator:
    """Who is still active: the ranks that were when anybody was asked last, all to begin with."""

    def __init__(self, comm: Comm, device: torch.device, divide_by_active: bool):
        self.comm, self.divide_by_active = comm, divide_by_active
        self.active = list(range(comm.size))
        self._device = device

    def tell(self, mine: Phase) -> Phase:
        """Tell the others, and learn what the active ranks do; ENDED when there are none.
        Raises ValueError on every rank when they do different things."""
        told = torch.zeros(self.comm.size, device=self._device)
        told[self.comm.rank] = mine
        self.comm.all_reduce(told)
        doing = {rank: Phase(int(x)) for rank, x in enumerate(told.tolist()) if x}
        if len(set(doing.values())) > 1:
            raise ValueError(
                "inside join() the active ranks call forward and backward alike; now "
                + ", ".join(
                    f"rank {rank} is in {what.name.lower()}" for rank, what in doing.items()
                )
            )
        if doing:
            self.active = list(doing)
        return next(iter(doing.values()), Phase.ENDED)

    @property
    def first(self) -> int:
        """An active rank, for all the same: it has what joined ranks no longer have."""
        return self.active[0]

    @property
    def i_am_active(self) -> bool:
        return self.comm.rank in self.active

    @property
    def divisor(self) -> int:
        """By what gradients are divided."""
        return len(self.active) if self.divide_by_active else self.comm.size
