"""What a machine or a container has little of: memory, descriptors, threads."""

from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import labkit
from labkit import Comm, World
from labkit.doctor import examine
from labkit.runtime import pick
from labkit.runtime.dispatcher import Dispatcher
from labkit.runtime.launch import ForkServer
from provoke import until
from tables import raises
from worlds import on_each_rank

MB = 1_000_000


def cgroup(folder: Path, limit: object, used: int, cached: int, version: int) -> None:
    """A made-up cgroup whose files hold these numbers of bytes."""
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    total = "total_" if version == 1 else ""
    stat = f"{total}active_file {cached // 2}\n{total}inactive_file {cached // 2}\nanon 5"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "stat"), (limit, used, stat)):
        (folder / f"memory.{name}").write_text(f"{text}\n")


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of made-up cgroups, v1 and v2; `membership` beside it is this process's."""
    monkeypatch.setattr(pick, "CGROUPS", tmp_path / "membership")
    monkeypatch.setattr(pick, "MOUNT", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def member_of(cgroups: Path, lines: str) -> None:
    (cgroups.parent / "membership").write_text(lines)


def test_a_limit_of_cgroup_v2_counts_and_file_caches_are_free(cgroups: Path) -> None:
    member_of(cgroups, "0::/a/b\n")
    cgroup(cgroups / "a/b", 900 * MB, 700 * MB, 100 * MB, 2)
    assert list(pick.left_by_cgroups()) == [300 * MB]
    assert pick.available_bytes() == min(300 * MB, psutil.virtual_memory().available)
    cgroup(cgroups / "a", 500 * MB, 450 * MB, 0, 2)
    assert pick.available_bytes() == 50 * MB, "the smallest limit of all ancestors"
    cgroup(cgroups / "a/b", "max", 10 * MB, 0, 2)
    assert pick.available_bytes() == 50 * MB, "a group without a limit has its ancestors'"


def test_a_limit_of_cgroup_v1_counts_also_inside_a_container(cgroups: Path) -> None:
    """There, the path is the host's, and the container sees its own group as the root."""
    member_of(cgroups, "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    cgroup(cgroups / "memory", 900 * MB, 600 * MB, 50 * MB, 1)
    assert list(pick.left_by_cgroups()) == [350 * MB]


def test_without_limits_the_machine_decides(cgroups: Path) -> None:
    assert list(pick.left_by_cgroups()) == []
    member_of(cgroups, "4:memory:/\n0::/\n")
    cgroup(cgroups / "memory", 9223372036854771712, 600 * MB, 0, 1)
    (cgroups / "memory.max").write_text("max\n")
    assert pick.available_bytes() <= psutil.virtual_memory().total


def test_a_world_too_large_for_a_cgroup_is_refused_and_doctor_names_it(cgroups: Path) -> None:
    member_of(cgroups, "0::/\n")
    cgroup(cgroups, 900 * MB, 580 * MB, 0, 2)
    raises(r"64 ranks are too many.*0\.3 GB are free.*up to 3\.", World, 64)
    with World(3) as world:
        assert world.run(lambda: Comm().rank) == [0, 1, 2]
    value = dict(examine().groups["machine"])["memory"]
    assert value.endswith("0.3 GB free (cgroup limit)")


def test_the_doctor_says_where_the_driver_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs are counted, and cannot be asked."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    report = examine()
    assert dict(report.groups["machine"])["GPUs"] == "none that torch sees"
    assert any("torch sees no GPU" in problem for problem in report.problems)


@pytest.mark.slow
def test_a_dead_server_leaves_no_descriptor() -> None:
    World(1).close()
    before = psutil.Process().num_fds()
    kept = []
    for _ in range(2):
        assert ForkServer._only is not None
        kept.append(ForkServer._only)  # as a traceback does, which a notebook keeps
        psutil.Process(ForkServer._only._process.pid).kill()
        ForkServer._only._process.wait()
        with World(2) as world:
            assert world.run(lambda: Comm().rank) == [0, 1]
    assert psutil.Process().num_fds() == before
    assert all(server._channel.fileno() < 0 for server in kept)


# ---- groups that are dropped


@pytest.fixture(scope="module", params=["shm", "gloo"])
def world3(request: pytest.FixtureRequest) -> World:
    with World(3, transport=request.param) as world:
        world.run(use_and_drop_subgroups)
        yield world


def use_and_drop_subgroups(count: int = 1) -> None:
    for _ in range(count):
        half = Comm().subgroup([0, 1])
        if half is not None:
            x = torch.ones(3)
            half.all_reduce(x)
            assert x.tolist() == [2, 2, 2]
            half.all_reduce(x, async_op=True, algorithm="ring").wait()  # over gloo's own messages


def forget(name: str) -> None:
    vars(labkit.attach().state).pop(name, None)


def held() -> tuple[int, int]:
    """Descriptors and threads of this rank."""
    return psutil.Process().num_fds(), psutil.Process().num_threads()


def test_dropped_subgroups_leave_no_descriptor_and_no_thread(world3: World) -> None:
    before = np.array(world3.run(held))
    world3.run(use_and_drop_subgroups, 10)
    # No more than before: a thread may still have been about to end then.
    assert until(lambda: (np.array(world3.run(held)) <= before).all()), (before, world3.run(held))


@on_each_rank("world3")
def test_while_subgroups_come_and_go_only_the_last_few_are_kept() -> None:
    fds_before = held()[0]
    for _ in range(20):
        use_and_drop_subgroups()
        assert held()[0] - fds_before <= 4 * 6


def test_a_subgroup_in_use_is_kept_however_it_is_held(world3: World) -> None:
    """By a `Comm`, a handle, or torch's group."""

    def hold() -> None:
        state = labkit.attach().state
        of_comm, of_handle, of_group = (Comm().subgroup([0, 1]) for _ in range(3))
        if of_comm is not None:
            state.by_comm, state.by_group, state.x = of_comm, of_group.group, torch.ones(1)
            state.by_handle = of_handle.all_reduce(state.x, async_op=True)

    def use() -> list[float]:
        state = labkit.attach().state
        if Comm().rank == 2:
            return []
        state.by_handle.wait()
        torch.distributed.all_reduce(x := torch.ones(1), group=state.by_group)
        state.by_comm.all_reduce(y := torch.ones(1))
        return [state.x.item(), x.item(), y.item()]

    world3.run(hold)
    world3.run(use_and_drop_subgroups, 3)
    assert world3.run(use) == [[2.0] * 3, [2.0] * 3, []]
    world3.run(forget, "by_handle")


def test_a_rank_that_drops_later_is_waited_for(world3: World) -> None:
    def make() -> None:
        half = Comm().subgroup([0, 1])
        if Comm().rank == 0:
            labkit.attach().state.half = half

    def groups() -> int:
        return len(Dispatcher.of(torch.distributed.group.WORLD)._subgroups)

    before = world3.run(groups)
    world3.run(make)
    for _ in range(3):
        world3.run(use_and_drop_subgroups)
    assert all(now > then for now, then in zip(world3.run(groups)[:2], before))
    world3.run(forget, "half")
    assert until(lambda: world3.run(groups) <= before)
