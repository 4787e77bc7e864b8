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
from labkit.runtime.launchers import backend_for, check_alone, launched, meet
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
    - under a launcher, such as torchrun, srun or mpirun (`labkit.runtime.launchers`): a rank of a
      new group;
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
    on_gpu = None
    if not dist.is_initialized():
        on_gpu = _init_process_group(backend, timeout_s)
        torch.manual_seed(seed)
    elif backend is not None and backend != dist.get_backend():
        raise ValueError(
            f"attach(backend={backend!r}): the group uses {dist.get_backend()!r}; omit backend"
        )
    if link is not None:
        here.link = link
    name = str(dist.get_backend())
    name = "nccl" if torch.cuda.is_available() and "cuda:nccl" in name else name
    if on_gpu is None:
        on_gpu = name == "nccl" or asked_for("device", None, "cpu", "cuda") == "cuda"
    device = torch.device("cpu")
    if on_gpu:
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


def _init_process_group(backend: str | None, timeout_s: float) -> bool:
    """Create the process group; return whether this rank computes on a GPU."""
    check_transport(VARIABLE, os.environ.get(VARIABLE))
    backend = backend or asked_for("backend", None, "gloo", "nccl")
    asked = asked_for("device", None, "cpu", "cuda")
    on_cpu = asked == "cpu" or (backend == "gloo" and asked is None)
    on_gpu, timeout = torch.cuda.is_available() and not on_cpu, timedelta(seconds=timeout_s)
    me = launched()
    if me is None:
        check_alone()
        use_loopback()
        store, rank, size = dist.HashStore(), 0, 1
        best = "nccl" if on_gpu else "gloo"
    else:
        store, members = meet(me, on_gpu, timeout_s)
        rank, size, best = me.rank, me.size, backend_for(members)
        if len({member.host for member in members}) == 1:
            use_loopback()
    backend = backend or best
    dist.init_process_group(
        BACKENDS.get(backend, backend), store=store, rank=rank, world_size=size, timeout=timeout
    )
    atexit.register(leave)
    return on_gpu


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
