"""Bring ranks to life: a `World` beside the notebook, or this process as one rank of a launch."""

from labkit.world.attach import Rank, attach
from labkit.world.errors import RankError, RankInterrupt
from labkit.world.progress import progress
from labkit.world.world import World

__all__ = ["Rank", "RankError", "RankInterrupt", "World", "attach", "progress"]
