"""Which rank a process is under each launcher, and real ones: mpirun, Slurm, two hosts."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from command import command, run
from labkit import read_run
from labkit.runtime import launchers
from labkit.runtime.launchers import Launched, Member, backend_for, check_alone, launched
from places import ROOT
from tables import raises

BY_HAND = {"RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "641597441",
}  # fmt: skip
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "n[1-2]"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}


def place(env: dict[str, str]) -> tuple[object, ...] | None:
    me = launched(env)
    return me and (me.launcher, me.rank, me.size, me.address)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        (BY_HAND, ("torchrun", 3, 16, "n1")),
        (BY_HAND | STEP, ("torchrun", 3, 16, "n1")),
        (STEP, ("srun", 2, 4, "gpu07")),
        (STEP | {"SLURM_STEP_NODELIST": "alone"}, ("srun", 2, 4, "alone")),
        (STEP | {"MASTER_ADDR": "10.0.0.1"}, ("srun", 2, 4, "10.0.0.1")),
        (STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (BATCH, None),
        (OPEN_MPI, ("mpirun", 1, 4, "127.0.0.1")),
        (OPEN_MPI | STEP | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("mpirun", 1, 4, "gpu07")),
        (PMI | {"SLURM_JOB_NODELIST": "a-1,b-2"}, ("mpiexec", 1, 2, "a-1")),
        ({"RANK": "0", "WORLD_SIZE": "4"}, None),
    ],
)
def test_each_launcher_says_which_rank_this_is(
    env: dict[str, str], expected: tuple[object, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place(env) == expected
    monkeypatch.setattr(launchers, "in_notebook", lambda: True)
    assert place(env) is None, "a notebook is a driver"


def test_ports_are_given_or_differ_between_jobs() -> None:
    def port(env: dict[str, str]) -> int:
        me = launched(env)
        assert me is not None
        return me.port

    assert port(BY_HAND) == 29500
    assert port(STEP) == port(STEP | {"SLURM_PROCID": "0"}) != port(STEP | {"SLURM_JOB_ID": "8"})
    assert port(STEP) != port(STEP | {"SLURM_STEP_ID": "1"})


def test_a_world_of_one_is_refused_where_more_are_announced() -> None:
    refused = partial(raises, error=RuntimeError)
    refused("has 4 tasks, but srun did not start", check_alone, BATCH)
    refused("MASTER_ADDR is not set", check_alone, {"RANK": "0", "WORLD_SIZE": "4"})
    refused("does not say where rank 0 is", launched, PMI)
    for env in ({}, STEP, BATCH | {"SLURM_NTASKS": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}):
        check_alone(env)


def test_nccl_needs_a_gpu_of_its_own_for_each_rank() -> None:
    def of(*gpus: str) -> list[Member]:
        return [Member(f"host{i // 2}", "10.0.0.1", gpu) for i, gpu in enumerate(gpus)]

    assert backend_for(of("a", "b", "a", "b")) == "nccl", "of two hosts"
    assert backend_for(of("a", "a", "b", "b")) == "gloo", "two ranks share one"
    assert backend_for(of("", "")) == "gloo"
    some = of("a", "", "a", "b")
    raises("rank 1 on host0: no GPU is visible", backend_for, some, error=RuntimeError)


# --- real launchers ---

SCRIPT = """
import os, labkit, torch
me = labkit.attach(timeout_s=30)
x = torch.ones(3) * me.rank
me.comm.all_reduce(x)
name = os.environ["GLOO_SOCKET_IFNAME"]
print(f"rank {me.rank} of {me.size}: {x.tolist()} by {name}", flush=True)
"""


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skip without these programs or root; `make test` starts no daemons and no network."""
    missing = [name for name in programs if shutil.which(name) is None]
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    why = f"needs {', '.join(missing)}" if missing else "needs root" if not root else ""
    why = why or "make cluster runs it" * ("LABKIT_CLUSTER" not in os.environ)
    return pytest.mark.skipif(bool(why), reason=why)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return [sys.executable, str(tmp_path / "script.py")]


def check_sums(text: str, size: int) -> list[str]:
    total = float(sum(range(size)))
    lines = sorted(line for line in text.splitlines() if line.startswith("rank"))
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} of {size}: {[total] * 3} by "), text
    assert len(lines) == size, text
    return lines


RECORDING = """
import sys
from pathlib import Path
from labkit.trace.recording import record
with record(sys.argv[1], what="two hosts"):
    me.comm.all_reduce(x)
    if "crash" in sys.argv:
        raise SystemExit("cut off")
print("complete" if me.rank else sorted(p.name for p in Path(sys.argv[1]).iterdir()))
"""


@pytest.mark.cluster
@needs("mpirun")
def test_mpirun(script: list[str]) -> None:
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "3"]
    check_sums(run("mpirun", *options, *script).stdout, 3)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two nodes, n1 and n2, on this machine; srun and sbatch find them by SLURM_CONF."""
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().partition(".")[0]
    nodes = "".join(
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={17010 + i} CPUs=4\n"
        for i in (1, 2)
    )
    (folder / "slurm.conf").write_text(
        f"ClusterName=lab\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort=17010\nSlurmUser=root\n"
        "MpiDefault=none\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
        f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/%n.pid\n"
        f"SlurmdSpoolDir={folder}/%n\nStateSaveLocation={folder}/state\n"
        f"SlurmctldLogFile={folder}/ctld.log\nSlurmdLogFile={folder}/%n.log\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n"
        f"SlurmdParameters=config_overrides\nReturnToService=2\n{nodes}"
        "PartitionName=main Nodes=n1,n2 Default=YES State=UP\n"
    )
    (folder / "state").mkdir()
    if subprocess.run(["pgrep", "munged"], capture_output=True).returncode:
        run(
            "sh",
            "-c",
            "mkdir -p /run/munge; chown munge: /run/munge; su -s /bin/sh munge -c munged",
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("MASTER_ADDR", "127.0.0.1")  # n1 and n2 have no address of their own
        daemons = [
            subprocess.Popen([*words, "-D"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for words in (["slurmctld"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"])
        ]
        try:
            deadline_s = time.monotonic() + 30
            while "2 idle" not in run("sinfo", "-h", "-o", "%D %t", status=None).stdout:
                assert time.monotonic() < deadline_s, (folder / "ctld.log").read_text()
                time.sleep(0.5)
            yield
        finally:
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(20)


@pytest.mark.cluster
@needs("slurmctld", "slurmd", "srun", "munged")
def test_slurm(slurm: None, script: list[str], tmp_path: Path) -> None:
    check_sums(run("srun", "-N2", "-n4", *script).stdout, 4)
    labkit = [sys.executable, "-m", "labkit"]
    text = run("srun", "-n2", *labkit, "run", "ddp", "--steps", "2", "--model", "tiny").stdout
    assert text.count("ddp on 2 ranks") == 1, "one world, and one report"
    batch = tmp_path / "batch.sh"
    batch.write_text("#!/bin/sh\n" + " ".join(script) + " 2>&1\n")
    run("sbatch", "--wait", "-n2", "-o", tmp_path / "out", batch, status=None)
    assert "has 2 tasks, but srun did not start" in (tmp_path / "out").read_text()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """The beginnings of commands on two hosts, h1 and h2, that each know their own name, as
    Debian's do, by 127.0.1.1."""
    prefix, words = f"lab{os.getpid()}", list[list[str]]()
    setup = f"ip link add {prefix}v1 type veth peer name {prefix}v2"
    for i, j in ((1, 2), (2, 1)):
        space, wire, file = f"{prefix}h{i}", f"{prefix}v{i}", tmp_path / f"h{i}"
        file.write_text(f"127.0.0.1 localhost\n127.0.1.1 h{i}\n10.9.0.{j} h{j}\n")
        setup += (
            f" && ip netns add {space} && ip link set {wire} netns {space}"
            f" && ip -n {space} link set lo up && ip -n {space} addr add 10.9.0.{i}/24 dev {wire}"
            f" && ip -n {space} link set {wire} up"
        )
        (tmp_path / f"disk{i}").mkdir()  # of this host alone, as a local disk is
        (tmp_path / "disk").mkdir(exist_ok=True)
        inside = f"mount --bind {tmp_path}/disk{i} {tmp_path}/disk; exec $0 $@"
        inside = f"hostname h{i}; mount --bind {file} /etc/hosts; {inside}"
        words.append(["ip", "netns", "exec", space, "unshare", "-um", "sh", "-c", inside])
    try:
        run("sh", "-c", setup)
        yield words
    finally:
        for i in (1, 2):
            subprocess.run(["ip", "netns", "del", f"{prefix}h{i}"], check=False)


def on_hosts(hosts: list[list[str]], *words: str) -> str:
    """Three ranks, of which rank 1 is on the second host."""
    env = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "h1", "MASTER_PORT": "29511"}
    started = [
        subprocess.Popen(
            [*hosts[host], *words], env=env | {"RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank, host in enumerate((0, 1, 0))
    ]  # fmt: skip
    return "".join(one.communicate(timeout=100)[0] for one in started)


@pytest.mark.cluster
@needs("ip", "unshare")
def test_two_hosts_find_the_interface_and_bring_a_run_together(
    hosts: list[list[str]], script: list[str], tmp_path: Path
) -> None:
    lines = check_sums(on_hosts(hosts, *script), 3)
    assert [line[-2:] for line in lines] == ["v1", "v2", "v1"]
    with open(script[1], "a") as file:
        file.write(RECORDING)
    text = on_hosts(hosts, *script, f"{tmp_path}/disk/whole")
    run_files = ["metrics.jsonl", "rank0.jsonl", "rank1.jsonl", "rank2.jsonl", "run.json"]
    assert f"{run_files}" in text and text.count("complete") == 2, text
    trace = read_run(tmp_path / "disk1/whole")
    assert [trace.ranks[rank].host for rank in range(3)] == ["h1", "h2", "h1"] and trace.complete
    on_hosts(hosts, *script, f"{tmp_path}/disk/cut", "crash")
    cut = tmp_path / "disk1/cut"
    assert sorted(read_run(cut).ranks) == [0, 2]
    assert "rank1.jsonl" in command(f"gather {cut} {tmp_path}/disk2/cut")
    assert sorted(read_run(cut).ranks) == [0, 1, 2]
    assert "already has rank1.jsonl" in command(f"gather {cut} {tmp_path}/disk2/cut", 2)


def test_a_launched_process_is_described() -> None:
    assert launched(BY_HAND) == Launched("torchrun", 3, 16, "n1", 29500)
