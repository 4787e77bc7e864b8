"""Make this process a rank: in `World.run`, under a launcher, alone, or without communication."""

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
from labkit.runtime.pick import VARIABLE, asked_for, check_transport


@dataclass
class Rank:
    """This process as a rank, as `labkit.attach()` returns it.

    `comm` is the `Comm` of all ranks. `state` keeps variables between runs (`me.state.model = ...`)
    and is the namespace of `%%ranks` cells.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    state: SimpleNamespace = field(default_factory=SimpleNamespace)
    control: Channel | None = field(default=None, repr=False)  # connection to the driver, if any

    @property
    def comm(self) -> Comm:
        return Comm()


BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}  # NCCL cannot move CPU tensors
_me: Rank | None = None


def current() -> Rank | None:
    """This process's rank, or None."""
    return _me


def become(rank: Rank) -> Rank:
    """Make `rank` the rank of this process."""
    global _me
    _me = rank
    return rank


def attach(
    backend: str | None = None, timeout_s: float = 600.0, link: Link | TwoLevel | None = None,
    seed: int = 0,
) -> Rank:  # fmt: skip
    """Make this process a rank, however it was started, and return the rank.

    - inside `World.run`: the rank that the world has assigned;
    - with an initialized process group: a rank of that group;
    - under a launcher that sets RANK and WORLD_SIZE (torchrun): a rank of a new group;
    - otherwise: the only rank of a new group.

    Args:
        backend, timeout_s, seed: used only if `attach` initializes the group. Default backend:
            LABKIT_BACKEND; else NCCL if each rank has a GPU, unless LABKIT_DEVICE=cpu; else gloo.
        link: the network link to model from this rank to the other ranks.

    Raises ValueError if this rank has a different link, or the group uses a different backend.

    >>> me = labkit.attach()
    >>> me.comm.all_reduce(x)
    """
    if _me is not None and (dist.is_initialized() or _me.control is not None):
        if link is not None and link != here.link:
            raise ValueError(f"attach(link={link}): this rank's link is {here.link}; omit link")
        return _me
    if not dist.is_initialized():
        _init_process_group(backend, timeout_s)
        torch.manual_seed(seed)
    elif backend is not None and backend != dist.get_backend():
        raise ValueError(
            f"attach(backend={backend!r}): the group uses {dist.get_backend()!r}; omit backend"
        )
    if link is not None:
        here.link = link
    name, device = str(dist.get_backend()), torch.device("cpu")
    name = "nccl" if torch.cuda.is_available() and "cuda:nccl" in name else name
    if name == "nccl" or asked_for("device", None, "cpu", "cuda") == "cuda":
        local = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return become(Rank(dist.get_rank(), dist.get_world_size(), device, name))


@contextmanager
def on_paper(rank: int, size: int) -> Iterator[Rank]:
    """Within the block, this process is rank `rank` of `size` ranks, without other processes.

    Every operation is recorded and completes immediately, so one process can show what one rank of
    a thousand would send. The results of collectives are meaningless. Raises RuntimeError if this
    process is already a rank, ValueError if `rank` is outside the world.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _me
    if dist.is_initialized():
        raise RuntimeError("on_paper: this process is already a rank; use a separate process")
    if not 0 <= rank < size:
        raise ValueError(
            f"on_paper: rank {rank} is not in a world of {ranks_in_words(size)}, 0 to {size - 1}"
        )
    before, worlds = _me, Dispatcher.worlds
    Dispatcher.worlds = 0  # use the group names of a process's first world
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    _me = Rank(rank, size, torch.device("cpu"), "fake")
    try:
        yield _me
    finally:
        dist.destroy_process_group()
        _me, Dispatcher.worlds = before, worlds


def _init_process_group(backend: str | None, timeout_s: float) -> None:
    check_transport(VARIABLE, os.environ.get(VARIABLE))
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    size = int(os.environ.get("WORLD_SIZE", 1))
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", size))
    on_cpu = asked_for("device", None, "cpu", "cuda") == "cpu" or not torch.cuda.is_available()
    best = "nccl" if enough_gpus and not on_cpu else "gloo"
    backend = backend or asked_for("backend", None, "gloo", "nccl") or best
    backend = BACKENDS.get(backend, backend)
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
    """Destroy the process group, so that the process exits cleanly."""
    if dist.is_initialized():
        dist.destroy_process_group()


def use_loopback(override: bool = False) -> None:
    """Restrict gloo and NCCL to the loopback interface. An interface that is already set in the
    environment is kept unless `override` is true."""
    if name := loopback():
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if override or variable not in os.environ:
                os.environ[variable] = name
