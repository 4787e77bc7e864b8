"""The variables that launchers set for the processes they start, and how these processes meet.

    launcher    rank                    world size              must also be set
    ────────────────────────────────────────────────────────────────────────────────────────
    torchrun    RANK                    WORLD_SIZE              MASTER_ADDR
    mpirun      OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_SIZE
    mpiexec     PMI_RANK                PMI_SIZE                MPI_LOCALNRANKS
    srun        SLURM_PROCID            SLURM_STEP_NUM_TASKS    SLURM_STEP_ID

The first row that applies is used: torchrun may run under srun. (submitit's jobs run under srun.) A
Jupyter kernel is never a rank: a notebook inside a job drives its own world.

The processes meet at a store at MASTER_ADDR:MASTER_PORT, or on the host that runs rank 0. There
they exchange their hosts, addresses and GPUs, from which the backend and the network interface
follow.
"""

import json
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from zlib import crc32

import psutil
import torch
from torch.distributed.rendezvous import rendezvous

from labkit.events import ranks_in_words
from labkit.runtime.output import in_notebook

ROWS = {
    "torchrun": ("RANK", "WORLD_SIZE", "MASTER_ADDR"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
}
JOB_IDS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID")
FIRST_PORT, PORTS = 20_000, 10_000


@dataclass(frozen=True)
class Launched:
    """This process, as its launcher describes it."""

    launcher: str
    rank: int
    size: int
    address: str  # of rank 0
    port: int


@dataclass(frozen=True)
class Member:
    """A rank's host, its address on the route to rank 0, and the UUID of its GPU, if any."""

    host: str
    address: str
    gpu: str


def launched(env: Mapping[str, str] = os.environ) -> Launched | None:
    """This process as a launcher has started it; None if no launcher has, and in a notebook.
    Raises RuntimeError if the launcher does not say where rank 0 is."""
    if in_notebook():
        return None
    name = next((name for name, row in ROWS.items() if all(v in env for v in row)), "")
    if not name:
        return None
    rank, size = (int(env[variable]) for variable in ROWS[name][:2])
    if size == 1 and name != "torchrun":
        return None
    port = FIRST_PORT + crc32("".join(env.get(x, "") for x in JOB_IDS).encode()) % PORTS
    address = env.get("MASTER_ADDR") or _address_of_rank_0(name, size, env)
    return Launched(name, rank, size, address, int(env.get("MASTER_PORT") or port))


def check_alone(env: Mapping[str, str] = os.environ) -> None:
    """Raises RuntimeError if other processes are announced, but this one cannot find them."""
    if in_notebook():
        return
    if "RANK" in env and int(env.get("WORLD_SIZE") or 1) > 1:
        raise RuntimeError(
            f"RANK={env['RANK']} and WORLD_SIZE={env['WORLD_SIZE']} announce other ranks, but "
            "MASTER_ADDR is not set; start the script with torchrun, or unset these variables"
        )
    if "SLURM_STEP_ID" not in env and int(env.get("SLURM_NTASKS") or 1) > 1:
        raise RuntimeError(
            f"this Slurm job has {env['SLURM_NTASKS']} tasks, but srun did not start this process; "
            "start the script with srun, or set SLURM_NTASKS=1 for one process"
        )


def _address_of_rank_0(name: str, size: int, env: Mapping[str, str]) -> str:
    """The host of rank 0: this machine, or the first node of Slurm's list, such as n[03-05,9]."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    if name != "srun" and int(env[ROWS[name][2]]) == size:
        return "127.0.0.1"
    if found := re.match(r"([^,\[]+)(?:\[(\w+))?", nodes):
        return found[1] + (found[2] or "")
    raise RuntimeError(
        f"{name} has started {ranks_in_words(size)} on several nodes and does not say where rank 0 "
        "is; pass MASTER_ADDR to all of them, as in mpirun -x MASTER_ADDR=$(hostname) ..."
    )


def meet(me: Launched, use_gpus: bool, timeout_s: float) -> tuple[Any, list[Member]]:
    """The store of all ranks, and the members by rank. Sets the variables of torch's "env://" and,
    unless they are set, the rank on this host and gloo's network interface."""
    os.environ |= {"RANK": str(me.rank), "WORLD_SIZE": str(me.size)}
    os.environ |= {"MASTER_ADDR": me.address, "MASTER_PORT": str(me.port)}
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    host, address = socket.gethostname(), _address_towards(me.address)
    members = _exchange(store, me, "host", Member(host, address, ""))
    others = [x.address for x in members if x.host != host and not _is_loopback(x.address)]
    if _is_loopback(address) and others:  # rank 0's host may call itself 127.0.1.1
        address = _address_towards(others[0])
    local = [x.host for x in members[: me.rank]].count(host)
    os.environ.setdefault("LOCAL_RANK", str(local))
    sizes = Counter(x.host for x in members)
    if len(set(sizes.values())) == 1:
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(sizes[host]))
    if interface := _interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    gpus = torch.cuda.device_count() if use_gpus else 0
    gpu = str(torch.cuda.get_device_properties(local % gpus).uuid) if gpus else ""
    return store, _exchange(store, me, "gpu", Member(host, address, gpu))


def _exchange(store: Any, me: Launched, what: str, own: Member) -> list[Member]:
    store.set(f"labkit/{what}/{me.rank}", json.dumps(asdict(own)))
    return [Member(**json.loads(store.get(f"labkit/{what}/{rank}"))) for rank in range(me.size)]


def backend_for(members: list[Member]) -> str:
    """NCCL with a GPU for each rank, else gloo. Raises RuntimeError if only some ranks see one."""
    without = [rank for rank, x in enumerate(members) if not x.gpu]
    if without and len(without) < len(members):
        where = ", ".join(f"rank {rank} on {members[rank].host}" for rank in without[:4])
        raise RuntimeError(
            f"{where}: no GPU is visible, but it is on other ranks; give every rank a GPU, or set "
            "LABKIT_DEVICE=cpu"
        )
    own_gpus = len({(x.host, x.gpu) for x in members}) == len(members)
    return "nccl" if own_gpus and not without else "gloo"


def _address_towards(host: str) -> str:
    """This machine's IP address on the route to `host`."""
    family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(there)  # sends nothing
        return str(sock.getsockname()[0])


def interface_towards(host: str) -> str:
    """The network interface on the route to `host`."""
    address = _address_towards(host)
    return f"{_interface_of(address) or 'unknown'} ({address})"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interface_of(address: str) -> str | None:
    found = psutil.net_if_addrs().items()
    return next((name for name, ends in found if any(x.address == address for x in ends)), None)
