"""Which backend and device a world gets when the user names none, and why."""

from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from labkit.runtime.memory import available_bytes

RANK_BYTES = 100e6  # what a rank takes before it does anything, with room to do something
MOST_RANKS = 256
SPARE_FILES = 16  # that a world opens beside the sockets of its ranks


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


def check_size(size: int) -> None:
    """Refuse a number of ranks that makes no sense here."""
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
