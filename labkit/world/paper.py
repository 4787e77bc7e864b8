"""A world on paper: this process is one rank of as many as you like, and nothing moves.

Every operation through the door is recorded and over at once, so that one process can show what
a rank of a thousand would send. Results of collectives are not to be believed.
"""

import torch
import torch.distributed as dist

from labkit.world import rank as ranks
from labkit.world.rank import Rank


def on_paper(rank: int, size: int) -> Rank:
    """Make this process rank `rank` of a world of `size` on paper.

    Raises RuntimeError in a process that is a rank already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("on_paper: this process is a rank already; use a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    ranks._me = Rank(rank, size, torch.device("cpu"), "fake")
    return ranks._me
