"""Bring ranks to life: a `World` beside the notebook, or this process as one rank of a launch."""

from labkit.world.attach import Rank, attach
from labkit.world.errors import RankError, RankInterrupt
from labkit.world.launch import warm_up_early
from labkit.world.output import in_notebook
from labkit.world.progress import progress
from labkit.world.world import World

__all__ = ["Rank", "RankError", "RankInterrupt", "World", "attach", "progress"]

if in_notebook():  # ranks will be wanted: what they import comes in while this process imports, too
    warm_up_early()
