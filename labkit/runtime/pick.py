"""What a world gets when the user names nothing: backend, device and transport, each with the
reason, and the largest number of ranks."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from labkit.comm import Link, TwoLevel
from labkit.runtime import folders

RANK_BYTES = 100e6  # what a rank takes before it does anything, with room to do something
MOST_RANKS = 256
SPARE_FILES = 16  # that a world opens beside the sockets of its ranks
CGROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

VARIABLE = "LABKIT_TRANSPORT"
NAMES = ("shm", "gloo")
LEAST_ROOM_BYTES = 128 << 20  # Docker gives 64 MB in all, which a few groups use up
RANK_ROOM_BYTES = 16 << 20  # what a rank of some groups, with some neighbours, may take


@dataclass(frozen=True)
class Pick:
    """A backend ("gloo", "nccl"), a device type ("cpu", "cuda") and the reason."""

    backend: str
    device: str
    why: str


def pick(size: int, backend: str | None, device: str | None, paced: bool = False) -> Pick:
    """Choose what is not given; `paced`: over a modelled wire, which only gloo can have. Raises
    ValueError for what this machine cannot do."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f'backend={backend!r}: choose "gloo", "nccl" or None (the best one here)')
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f'device={device!r}: choose "cpu", "cuda" or None (the best one here)')
    if device == "cuda" and not gpus:
        raise ValueError(
            'device="cuda": torch sees no GPU here; leave it out, or see labkit doctor'
        )
    if backend == "nccl":
        if device == "cpu":
            raise ValueError('backend="nccl" moves GPU tensors only; use backend="gloo" on the CPU')
        if gpus < size or not dist.is_nccl_available():
            raise ValueError(
                f'backend="nccl" needs a GPU for each of the {size} ranks, here are {gpus}; '
                'use backend="gloo", whose ranks can share one'
            )
        return Pick("nccl", "cuda", "as asked")
    if backend == "gloo" and device is None:
        return Pick("gloo", "cpu", "gloo as asked")
    if device == "cpu":
        return Pick("gloo", "cpu", "the CPU as asked")
    if not gpus:
        return Pick("gloo", "cpu", "torch sees no GPU here")
    if backend is None and gpus >= size and dist.is_nccl_available():
        if paced:
            return Pick("gloo", "cuda", f"{gpus} GPUs, but NCCL's messages cannot be paced")
        return Pick("nccl", "cuda", f"{gpus} GPUs, one for each rank")
    return Pick(
        "gloo", "cuda", f"{size} ranks share {gpus} GPU{'s' * (gpus > 1)}: NCCL wants one each"
    )


def pick_transport(
    size: int, picked: Pick, asked: str | None, backend: str | None, link: Link | TwoLevel | None
) -> tuple[str, str]:
    """The transport as events name it ("shm", "gloo", "nccl"), and why not shared memory ("" for a
    world that has it, or was told to do without).

    Shared memory for the ranks of one machine's CPU, where it serves; else the backend. The first
    that says something decides: `asked`, the argument; LABKIT_TRANSPORT in the environment, where
    it can be had; `backend`, which may name gloo. Raises ValueError for an unknown name, and for
    `asked` where this world cannot have it.
    """
    wished = os.environ.get(VARIABLE)
    check_transport("transport", asked)
    check_transport(VARIABLE, wished)
    if picked.backend != "gloo":
        if asked:
            raise ValueError(
                f'transport="{asked}" is for gloo ranks; this world has {picked.backend}, which '
                "moves GPU tensors itself: leave transport out"
            )
        return picked.backend, ""
    if link is not None:
        if asked == "shm":
            raise ValueError(
                'transport="shm" and a link: the messages of a modelled wire go by gloo, so leave '
                "one out"
            )
        return "gloo", ""
    if named := asked or wished or backend:
        return named, ""
    if picked.device != "cpu":
        return "gloo", ""
    problem = _shared_memory_problem(size)
    return "gloo" if problem else "shm", problem


def check_transport(source: str, name: str | None) -> None:
    """Raises ValueError where `name`, which `source` gives, is no transport."""
    if name not in (None, "", *NAMES):
        raise ValueError(
            f'{source}={name!r}: choose "shm" (memory that the ranks share) or "gloo" '
            "(messages), or leave it out for the best one here"
        )


def _shared_memory_problem(size: int) -> str:
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
    return "" if os.access(folders.MEMORY, os.W_OK) else f"{folders.MEMORY} is not writable here"


def check_size(size: int) -> None:
    """Raises TypeError or ValueError for a number of ranks that this machine cannot run."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"World({size!r}): the number of ranks is an integer")
    if size < 1:
        raise ValueError(f"World({size}): a world has at least 1 rank")
    free_bytes = available_bytes()
    fitting = max(1, int(free_bytes / RANK_BYTES))
    if size > fitting:
        raise ValueError(
            f"World({size}): {size:,} ranks are too many for this machine. A rank takes about "
            f"{RANK_BYTES / 1e6:.0f} MB and {free_bytes / 1e9:.1f} GB are free (of the cgroup's "
            f"limit, where that is less): choose up to {min(fitting, MOST_RANKS)}."
        )
    if size > MOST_RANKS:
        raise ValueError(f"World({size}): one machine runs up to {MOST_RANKS} ranks here")
    most = _most_by_files()
    if size > most:
        raise ValueError(
            f"World({size}): this process may not open enough files for it, only for "
            f"{max(0, most)} ranks; close some, or raise the limit (`ulimit -n 4096` in the "
            "shell that starts it)"
        )


def _most_by_files() -> int:
    """Each rank has two sockets in this process, and one to every other rank."""
    try:
        import resource
    except ImportError:  # a platform without such limits
        return MOST_RANKS
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MOST_RANKS
    return (limit - psutil.Process().num_fds() - SPARE_FILES) // 2


def available_bytes() -> int:
    """What the machine has free, and no more than the cgroups of this process may still take."""
    return min([psutil.virtual_memory().available, *left_by_cgroups()])


def left_by_cgroups() -> Iterator[int]:
    """What each memory limit of this process's cgroup (v1 or v2) and its ancestors leaves, in
    bytes. Caches of files count as left."""
    for line in CGROUPS.read_text().splitlines() if CGROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)  # v2 names no controllers
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        total = "total_" if controllers else ""
        group = MOUNT / controllers / path.strip("/")
        for folder in [group, *group.parents]:
            with suppress(OSError, ValueError, KeyError):  # no limit, or a path outside a container
                limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
                stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                cached = [int(stat[f"{total}{kind}_file"]) for kind in ("active", "inactive")]
                yield limit - used + sum(cached)
