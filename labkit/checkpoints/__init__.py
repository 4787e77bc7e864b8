"""Checkpoints that any strategy on any number of ranks can load, in torch's own format.

    save_checkpoint("runs/gpt", model, optimizer, step=100)
    step = load_checkpoint("runs/gpt", model, optimizer).step

Every rank must make both calls.
"""

from labkit.checkpoints.loading import Loaded, load_checkpoint
from labkit.checkpoints.saving import save_checkpoint

__all__ = ["Loaded", "load_checkpoint", "save_checkpoint"]
