"""Defaults for a world: backend, device and transport, with reasons, and the largest size."""

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

RANK_BYTES = 100e6  # memory of an idle rank, plus room to work
MAX_RANKS = 256
SPARE_FILES = 16  # files that a world opens besides its ranks' sockets
CGROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

VARIABLE = "LABKIT_TRANSPORT"
TRANSPORTS = ("shm", "gloo")
MIN_SHM_BYTES = 128 << 20  # a few groups would use up Docker's default, 64 MB
RANK_SHM_BYTES = 16 << 20  # shared memory per rank, for several groups


@dataclass(frozen=True)
class Pick:
    """A backend ("gloo", "nccl"), a device type ("cpu", "cuda") and the reason."""

    backend: str
    device: str
    why: str


def pick(size: int, backend: str | None, device: str | None, paced: bool = False) -> Pick:
    """Choose the backend and device: as given, or LABKIT_BACKEND and LABKIT_DEVICE, or the best.
    `paced`: over a modeled link (gloo only). Raises ValueError for an unsupported choice."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if paced and backend == "nccl":
        raise ValueError('backend="nccl" cannot model a link; omit one of the two')
    backend = asked_for("backend", backend, "gloo", "nccl")
    device = asked_for("device", device, "cpu", "cuda")
    if backend == "nccl" and not paced:
        if device == "cpu":
            raise ValueError(
                'backend="nccl" moves GPU tensors only, but device="cpu"; use backend="gloo", or '
                "unset LABKIT_BACKEND or LABKIT_DEVICE"
            )
        if gpus < size or not dist.is_nccl_available():
            raise ValueError(
                f'backend="nccl" needs a GPU for each of the {size} ranks, but there are '
                f'{gpus}; use backend="gloo", whose ranks can share one'
            )
        return Pick("nccl", "cuda", "as asked")
    if backend == "gloo" and device is None:
        return Pick("gloo", "cpu", "gloo as asked")
    if device == "cpu":
        return Pick("gloo", "cpu", "the CPU as asked")
    if not gpus:
        return Pick("gloo", "cpu", "torch sees no GPU here")
    if backend != "gloo" and gpus >= size and dist.is_nccl_available():
        if paced:
            return Pick("gloo", "cuda", f"{gpus} GPUs, but NCCL's messages cannot be paced")
        return Pick("nccl", "cuda", f"{gpus} GPUs, one for each rank")
    return Pick(
        "gloo", "cuda", f"{size} ranks share {gpus} GPU{'s' * (gpus > 1)}: NCCL needs one each"
    )


def asked_for(what: str, given: str | None, *choices: str) -> str | None:
    """The argument `what`, or else the variable LABKIT_WHAT; None if neither is set. Raises
    ValueError for any other choice, or for "cuda" without a GPU."""
    source, name = what, given
    if given is None:
        source = f"LABKIT_{what.upper()}"
        name = os.environ.get(source) or None
    if name not in (None, *choices):
        raise ValueError(f"{source}={name!r}: choose {' or '.join(choices)}, or omit it")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'{source}="cuda": torch finds no GPU; omit it, or run labkit doctor')
    return name


def pick_transport(
    size: int, picked: Pick, asked: str | None, backend: str | None, link: Link | TwoLevel | None
) -> tuple[str, str]:
    """The transport's name in events ("shm", "gloo", "nccl"), and why shared memory is unavailable
    ("" if shared memory is used or not wanted).

    Ranks on one machine's CPU use shared memory where possible. Overrides, the first wins: the
    argument `asked`; LABKIT_TRANSPORT, except with NCCL or a link; `backend="gloo"`. Raises
    ValueError for an unknown name, or if this world does not support `asked`.
    """
    requested = os.environ.get(VARIABLE)
    check_transport("transport", asked)
    check_transport(VARIABLE, requested)
    if picked.backend != "gloo":
        if asked:
            raise ValueError(
                f'transport="{asked}" is for gloo ranks; this world has {picked.backend}, which '
                "moves GPU tensors itself; omit transport"
            )
        return picked.backend, ""
    if link is not None:
        if asked == "shm":
            raise ValueError(
                'transport="shm" cannot model a link; omit the link, or use transport="gloo"'
            )
        return "gloo", ""
    if named := asked or requested or backend:
        return named, ""
    if picked.device != "cpu":
        return "gloo", ""
    problem = _shared_memory_problem(size)
    return "gloo" if problem else "shm", problem


def check_transport(source: str, name: str | None) -> None:
    """Raises ValueError if `name`, given by `source`, is not a transport."""
    if name not in (None, "", *TRANSPORTS):
        raise ValueError(
            f'{source}={name!r}: choose "shm" (memory that the ranks share) or "gloo" '
            "(messages), or omit it to use the best available"
        )


def _shared_memory_problem(size: int) -> str:
    wanted_bytes = max(MIN_SHM_BYTES, size * RANK_SHM_BYTES)
    try:
        free_bytes = shutil.disk_usage(folders.MEMORY).free
    except OSError:
        return f"there is no {folders.MEMORY}"
    if free_bytes < wanted_bytes:
        return (
            f"{folders.MEMORY} has {free_bytes / 1e6:.0f} MB free, but {size} ranks may need "
            f"{wanted_bytes / 1e6:.0f} MB"
        )
    return "" if os.access(folders.MEMORY, os.W_OK) else f"{folders.MEMORY} is not writable here"


def check_size(size: int) -> None:
    """Raises TypeError or ValueError if this machine cannot run `size` ranks."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"World({size!r}): the number of ranks must be an integer")
    if size < 1:
        raise ValueError(f"World({size}): a world needs at least 1 rank")
    free_bytes = available_bytes()
    fitting = max(1, int(free_bytes / RANK_BYTES))
    if size > fitting:
        raise ValueError(
            f"World({size}): {size:,} ranks are too many for this machine. A rank takes about "
            f"{RANK_BYTES / 1e6:.0f} MB, and {free_bytes / 1e9:.1f} GB are free (or left in the "
            f"cgroup, if less): choose up to {min(fitting, MAX_RANKS)}."
        )
    if size > MAX_RANKS:
        raise ValueError(f"World({size}): choose at most {MAX_RANKS} ranks for one machine")
    most = _most_by_files()
    if size > most:
        raise ValueError(
            f"World({size}): the limit on open files allows only {max(0, most)} ranks; "
            "close some files, or raise the limit (`ulimit -n 4096` before you start Python)"
        )


def _most_by_files() -> int:
    """The number of ranks that the limit on open files allows, at two sockets per rank."""
    try:
        import resource
    except ImportError:  # a platform without such limits
        return MAX_RANKS
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MAX_RANKS
    return (limit - psutil.Process().num_fds() - SPARE_FILES) // 2


def available_bytes() -> int:
    """The machine's free memory, capped by what this process's cgroups still allow."""
    return min([psutil.virtual_memory().available, *left_by_cgroups()])


def left_by_cgroups() -> Iterator[int]:
    """Bytes left under each memory limit of this process's cgroup (v1 or v2) and its ancestors,
    counting file caches as free."""
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
