"""This process as a rank, however it was started.

inside World.run                 the rank that the world made it
under torchrun, srun, yours      a rank of the process group that is, or is now, initialised
alone                            a world of one rank
on paper                         one rank of as many as you like, of which nothing moves
"""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from labkit.comm import Comm, Link, TwoLevel, here
from labkit.events import ranks_in_words
from labkit.runtime.channel import Channel, loopback
from labkit.runtime.dispatcher import Dispatcher
from labkit.runtime.pick import VARIABLE, check_transport


@dataclass
class Rank:
    """This process as a rank: what `labkit.attach()` returns.

    `rank`, `size`, `device`, `backend`; `comm` is the `Comm` of all ranks; `state` keeps what you
    put there between runs (`me.state.model = ...`), and is where the cells of `%%ranks` live.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    state: SimpleNamespace = field(default_factory=SimpleNamespace)
    control: Channel | None = field(default=None, repr=False)  # to the driver, where there is one

    @property
    def comm(self) -> Comm:
        return Comm()


_me: Rank | None = None


def current() -> Rank | None:
    """The rank that this process is, if it is one."""
    return _me


def become(rank: Rank) -> Rank:
    """Make this process `rank`, for good."""
    global _me
    _me = rank
    return rank


def attach(
    backend: str | None = None, timeout_s: float = 600.0, link: Link | TwoLevel | None = None,
    seed: int = 0,
) -> Rank:  # fmt: skip
    """Make this process a rank, however it was started, and return it.

    - inside `World.run`: the rank it already is;
    - with an initialised process group: a rank of it;
    - under torchrun: initialises the group from its environment first (RANK, WORLD_SIZE, ...);
    - else: a world of one rank.

    Args:
        backend, timeout_s, seed: of the group that is initialised here, if one is; NCCL where
            there is a GPU for each rank, else gloo.
        link: a modelled wire for this rank.

    Raises ValueError when arguments are given for what is already decided.

    >>> me = labkit.attach()
    >>> me.comm.all_reduce(x)
    """
    if _me is not None and (dist.is_initialized() or _me.control is not None):
        if link is not None and link != here.link:
            raise ValueError(f"attach(link={link}): this rank has its link: {here.link}")
        return _me
    if not dist.is_initialized():
        _join(backend, timeout_s)
        torch.manual_seed(seed)
    elif backend is not None and backend != dist.get_backend():
        raise ValueError(
            f"attach(backend={backend!r}): the process group here is {dist.get_backend()!r}"
        )
    if link is not None:
        here.link = link
    name = str(dist.get_backend())
    local = int(os.environ.get("LOCAL_RANK", 0))
    use_gpu = torch.cuda.is_available() and (name == "nccl" or "cuda:nccl" in name)
    device = torch.device("cuda", local % torch.cuda.device_count()) if use_gpu else "cpu"
    if use_gpu:
        torch.cuda.set_device(device)
    return become(Rank(dist.get_rank(), dist.get_world_size(), torch.device(device), name))


@contextmanager
def on_paper(rank: int, size: int) -> Iterator[Rank]:
    """In this block, this process is rank `rank` of a world of `size` without any other process.

    Every operation is recorded and over at once, so that one process can show what a rank of a
    thousand would send. The results of collectives mean nothing. Raises RuntimeError in a process
    that is a rank already, ValueError for a rank outside the world.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _me
    if dist.is_initialized():
        raise RuntimeError("on_paper: this process is a rank already; use a process of its own")
    if not 0 <= rank < size:
        raise ValueError(
            f"on_paper: rank {rank} is not one of {ranks_in_words(size)}, 0 to {size - 1}"
        )
    before, worlds = _me, Dispatcher.worlds
    Dispatcher.worlds = 0  # its groups are named as those of a first world: the same every time
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    _me = Rank(rank, size, torch.device("cpu"), "fake")
    try:
        yield _me
    finally:
        dist.destroy_process_group()
        _me, Dispatcher.worlds = before, worlds


def _join(backend: str | None, timeout_s: float) -> None:
    check_transport(VARIABLE, os.environ.get(VARIABLE))
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    size = int(os.environ.get("WORLD_SIZE", 1))
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and enough_gpus else "gloo"
    if not launched or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        use_loopback()
    timeout = timedelta(seconds=timeout_s)
    if launched:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    atexit.register(leave)


def leave() -> None:
    """Leave the process group, so that the process can end quietly."""
    if dist.is_initialized():
        dist.destroy_process_group()


def use_loopback(whatever_is_set: bool = False) -> None:
    """Keep gloo and NCCL off every network but this machine's own, unless the user's environment
    says otherwise and may."""
    if name := loopback():
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if whatever_is_set or variable not in os.environ:
                os.environ[variable] = name
