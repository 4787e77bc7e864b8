"""`labkit doctor`: report this machine's hardware, the backends labs will pick, and problems."""

import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from timeit import repeat

import numpy as np
import psutil
import torch
from rich.table import Table

from labkit import __version__
from labkit.bench.harness import sync_of
from labkit.bench.machine import NAME
from labkit.clusters import Cluster, read_clusters
from labkit.foreign import check_output, markup
from labkit.runtime.attach import attach
from labkit.runtime.channel import loopback
from labkit.runtime.errors import RankError
from labkit.runtime.launchers import check_alone, interface_towards, launched
from labkit.runtime.pick import available_bytes, check_size, pick, pick_transport
from labkit.runtime.world import World

LAB_PACKAGES = ("ipykernel", "ipywidgets", "jupyterlab")
OLDEST_TORCH = (2, 11)
MESSAGE_BYTES = 16 * 2**20


@dataclass
class Findings:
    """Grouped (name, value) pairs, and one sentence per problem."""

    groups: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, group: str, name: str, value: str) -> None:
        self.groups.setdefault(group, []).append((name, value))


def examine() -> Findings:
    """Examine versions, hardware, backends, and communication in a real world of two ranks."""
    report = Findings()
    for examine_part in (_versions, _hardware, _job, _picks, _links):
        examine_part(report)
    return report


def check_cluster_file(path: Path) -> None:
    """Raises ValueError, before a slow measurement, unless `path` is new or contains only
    earlier measurements of this machine."""
    check_output(path)
    if not path.exists():
        return
    try:
        others = read_clusters(path).keys() - {NAME}
    except ValueError as error:
        raise ValueError(
            f"{path} exists and is not a cluster file; choose another name. ({error})"
        ) from None
    if others:
        raise ValueError(
            f"{path} has other clusters ({', '.join(sorted(others))}) that would be lost; "
            "choose another file"
        )


def cluster_table(cluster: Cluster) -> Table:
    """The measured rates of a machine, and how each was measured."""
    device, link = cluster.device, cluster.inside
    rows = [
        *(
            (f"matmul, {dtype}", f"{rate / 1e9:.1f} GFLOP/s", f"peak_flops.{dtype}")
            for dtype, rate in device.peak_flops.items()
        ),
        ("matrix size at half the peak rate", f"{device.tile:.1f}", "tile"),
        ("memory", f"{device.memory_bytes / 1e9:.1f} GB", "memory_bytes"),
        ("memory bandwidth", f"{device.memory_bytes_per_s / 1e9:.1f} GB/s", "memory_bytes_per_s"),
        ("shortest operation", f"{device.launch_s * 1e6:.1f} us", "launch_s"),
    ]
    if cluster.size > 1:
        rows += [
            ("link bandwidth", f"{link.bytes_per_s / 1e9:.2f} GB/s", "bytes_per_s"),
            ("link latency, per step", f"{link.latency_s * 1e6:.1f} us", "latency_s"),
            ("start of a collective", f"{link.start_s * 1e6:.1f} us", "start_s"),
        ]
    sources = {**link.sources, **device.sources}
    shown = Table("per rank", title=markup(cluster.title), title_justify="left")
    shown.add_column("value", justify="right")
    shown.add_column("measured by")
    for name, value, source in rows:
        shown.add_row(name, value, sources[source].split("; measured on")[0])
    return shown


def _versions(report: Findings) -> None:
    report.add("versions", "labkit", __version__)
    report.add("versions", "Python", f"{platform.python_version()} ({sys.executable})")
    report.add("versions", "torch", torch.__version__)
    report.add("versions", "numpy", np.__version__)
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        report.problems.append("labkit supports Python 3.11 to 3.13; use one of these")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        report.problems.append("labkit needs torch 2.11 or newer: pip install -U torch")
    missing = [name for name in LAB_PACKAGES if importlib.util.find_spec(name) is None]
    report.add("versions", "notebooks", f"missing {', '.join(missing)}" if missing else "ready")
    if missing:
        report.problems.append("the notebooks need more packages: pip install 'labkit[lab]'")


def _hardware(report: Findings) -> None:
    memory, free_bytes = psutil.virtual_memory(), available_bytes()
    limited = " (cgroup limit)" if free_bytes < 0.9 * memory.available else ""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.add("machine", "system", f"{platform.system()} {platform.machine()}")
    report.add("machine", "cores", f"{psutil.cpu_count()}, {usable} of them for this process")
    free = f"{free_bytes / 1e9:.1f} GB free{limited}"
    report.add("machine", "memory", f"{memory.total / 1e9:.0f} GB, {free}")
    if free_bytes < 2e9:
        report.problems.append("less than 2 GB of memory is free: close programs before a lab")
    folder = tempfile.gettempdir()
    free_gb = shutil.disk_usage(folder).free / 1e9
    report.add("machine", "temporary files", f"{folder}, {free_gb:.0f} GB free")
    has_gpu = torch.cuda.is_available()  # device_count() also counts GPUs with an outdated driver
    if not has_gpu:
        report.add("machine", "GPUs", "none that torch sees")
    for i in range(torch.cuda.device_count() if has_gpu else 0):
        gpu = torch.cuda.get_device_properties(i)
        report.add("machine", f"GPU {i}", f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB")
    if shutil.which("nvidia-smi") and not has_gpu:
        report.problems.append(
            "there is an NVIDIA driver, but torch sees no GPU: this may be a CPU build of torch"
        )


def _job(report: Findings) -> None:
    """Addresses, limits and settings; and this process's rank, if a launcher has started it."""
    report.add("network", "host", socket.gethostname())
    for name, ends in psutil.net_if_addrs().items():
        addresses = [x.address for x in ends if x.family in (socket.AF_INET, socket.AF_INET6)]
        if addresses:
            report.add("network", name, ", ".join(addresses))
    for name, limit in (
        ("open files", "RLIMIT_NOFILE"),
        ("locked memory, bytes", "RLIMIT_MEMLOCK"),
    ):
        with suppress(ImportError):  # a platform without such limits
            import resource

            soft = resource.getrlimit(getattr(resource, limit))[0]
            unlimited = soft == resource.RLIM_INFINITY
            report.add("machine", name, "no limit" if unlimited else f"at most {soft:,}")
    if torch.cuda.is_available() and hasattr(torch.cuda, "nccl"):
        report.add("versions", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    if job := os.environ.get("SLURM_JOB_ID"):
        nodes = os.environ.get("SLURM_JOB_NODELIST", "unknown nodes")
        report.add("job", "Slurm", f"job {job} on {nodes}")
    try:
        me = launched()
        if me is None:
            check_alone()
        else:
            where = f"rank {me.rank} of {me.size}; rank 0 listens at {me.address}:{me.port}"
            report.add("job", me.launcher, where)
            report.add("job", "interface to rank 0", interface_towards(me.address))
    except (RuntimeError, OSError) as error:
        report.problems.append(str(error))
    for name in sorted(os.environ):
        if name.startswith(("LABKIT_", "NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES")):
            report.add("job", name, os.environ[name])


def _picks(report: Findings) -> None:
    report.add("ranks", "loopback interface", loopback() or "unknown")
    report.add("ranks", "start", "forked from a warm server" if hasattr(os, "fork") else "spawned")
    for size in (2, 4, 8):
        try:
            check_size(size)
            choice = pick(size, None, None)
            transport, why_not = pick_transport(size, choice, None, None, None)
            transport += f" ({why_not})" if why_not else ""
            what = f"{choice.backend} on {choice.device}: {choice.why}"
            report.add("ranks", f"World({size})", f"{what}; tensors through {transport}")
        except ValueError as error:
            report.add("ranks", f"World({size})", str(error))


def _links(report: Findings) -> None:
    """Start two ranks and time their messages."""
    began_s = time.perf_counter()
    try:
        with World(2, timeout_s=20) as world:
            ready_s = time.perf_counter() - began_s
            latency_s, seconds = world.run(_time_messages)[0]
    except (RankError, RuntimeError, OSError, ValueError) as error:
        report.problems.append(f"two ranks could not communicate: {error}")
        return
    report.add("ranks", "startup of two ranks", f"{ready_s:.2f} s for the first World")
    report.add("ranks", "round trip of a message", f"{latency_s * 1e6:.0f} us")
    busbw = MESSAGE_BYTES / seconds / 1e9
    report.add("ranks", "all-reduce of 16 MiB", f"{seconds * 1e3:.1f} ms, {busbw:.2f} GB/s busbw")


def _time_messages() -> tuple[float, float]:
    """Minimum seconds of a one-element round trip and of a 16 MiB all-reduce between two ranks."""
    me = attach()
    comm, small = me.comm, torch.zeros(1, device=me.device)
    large, sync = torch.zeros(MESSAGE_BYTES // 4, device=me.device), sync_of(me.device)

    def ping_pong() -> None:
        for turn in (0, 1):
            if comm.rank == turn:
                comm.send(small, 1 - turn)
            else:
                comm.recv(small, turn)
        sync()

    def all_reduce() -> None:
        comm.all_reduce(large)
        sync()

    return min(repeat(ping_pong, number=1, repeat=50)), min(repeat(all_reduce, number=1, repeat=5))
