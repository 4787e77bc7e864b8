"""What carries the tensors of a world when the user does not say, and why."""

import os
import shutil
from dataclasses import dataclass

from labkit.comm import Link, TwoLevel
from labkit.runtime import folders
from labkit.runtime.pick import Pick

VARIABLE = "LABKIT_TRANSPORT"
NAMES = ("shm", "gloo")
LEAST_ROOM_BYTES = 128 << 20  # Docker gives 64 MB in all, which a few groups use up
RANK_ROOM_BYTES = 16 << 20  # what a rank of some groups, with some neighbours, may take


@dataclass(frozen=True)
class TransportChoice:
    """A name as events have it ("shm", "gloo", "nccl"), and why not shared memory ("" for a
    world that has it, or was told to do without)."""

    name: str
    why_not: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why_not})" if self.why_not else self.name


def pick_transport(
    size: int, picked: Pick, asked: str | None, backend: str | None, link: Link | TwoLevel | None
) -> TransportChoice:
    """Shared memory for the ranks of one machine's CPU, where it serves; else the backend.

    The first that says something decides: `asked`, the argument; LABKIT_TRANSPORT in the
    environment, where it can be had; `backend`, which may name gloo. Raises ValueError for names
    that are none, and for `asked` that cannot be had.
    """
    wished = os.environ.get(VARIABLE) or None
    for source, name in (("transport", asked), (VARIABLE, wished)):
        if name not in (None, *NAMES):
            raise ValueError(
                f'{source}={name!r}: choose "shm" (memory that the ranks share) or "gloo" '
                "(messages), or leave it out for the best one here"
            )
    if picked.backend != "gloo":
        if asked:
            raise ValueError(
                f'transport="{asked}" is for gloo ranks; this world has {picked.backend}, which '
                "moves GPU tensors itself: leave transport out"
            )
        return TransportChoice(picked.backend)
    if link is not None:
        if asked not in (None, "gloo"):
            raise ValueError(
                f'transport="{asked}" and a link: the messages of a modelled wire go by gloo, so '
                "leave one out"
            )
        return TransportChoice("gloo")
    if named := asked or wished or backend:
        return TransportChoice(named)
    if picked.device != "cpu":
        return TransportChoice("gloo")
    problem = _no_room(size)
    return TransportChoice("gloo", problem) if problem else TransportChoice("shm")


def _no_room(size: int) -> str:
    """Why the system's folder for shared memory does not serve `size` ranks; nothing if it does."""
    wanted_bytes = max(LEAST_ROOM_BYTES, size * RANK_ROOM_BYTES)
    try:
        free_bytes = shutil.disk_usage(folders.MEMORY).free
    except OSError:
        return f"there is no {folders.MEMORY}"
    if free_bytes < wanted_bytes:
        return (
            f"{folders.MEMORY} has {free_bytes / 1e6:.0f} MB free, and {size} ranks may want "
            f"{wanted_bytes / 1e6:.0f} MB"
        )
    return "" if os.access(folders.MEMORY, os.W_OK) else f"{folders.MEMORY} is not for us to write"
