"""What a machine or a container has little of: memory, descriptors, threads."""

from pathlib import Path

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

MB = 1_000_000


def cgroup(folder: Path, limit: object, used: int, cached: int, version: int) -> None:
    """A made-up cgroup whose files hold these numbers of bytes."""
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    total = "total_" if version == 1 else ""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{used}\n")
    stat = f"{total}active_file {cached // 2}\n{total}inactive_file {cached // 2}\nanon 5\n"
    (folder / "memory.stat").write_text(stat)


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


def test_a_world_too_large_for_its_cgroup_is_refused_and_the_doctor_names_the_limit(
    cgroups: Path,
) -> None:
    member_of(cgroups, "0::/\n")
    cgroup(cgroups, 900 * MB, 580 * MB, 0, 2)
    with pytest.raises(ValueError, match=r"64 ranks are too many.*0\.3 GB are free.*up to 3\."):
        World(64)
    with World(3) as world:
        assert world.run(lambda: Comm().rank) == [0, 1, 2]
    value = dict(examine().groups["machine"])["memory"]
    assert value.endswith("0.3 GB free (the limit of a cgroup)")


def test_the_doctor_says_where_the_driver_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs are counted, and cannot be asked."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    found = examine()
    assert dict(found.groups["machine"])["GPUs"] == "none that torch sees"
    assert any("torch finds no GPU" in problem for problem in found.problems)


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
    before = world3.run(held)

    def no_more_than_before() -> bool:  # (a thread may still have been about to end then)
        pairs = zip(world3.run(held), before, strict=True)
        return all(
            fds <= fds_then and threads <= then for (fds, threads), (fds_then, then) in pairs
        )

    world3.run(use_and_drop_subgroups, 10)
    assert until(no_more_than_before), (before, world3.run(held))


def test_while_subgroups_come_and_go_only_the_last_few_are_kept(world3: World) -> None:
    def come_and_go() -> int:
        before, most = held()[0], 0
        for _ in range(20):
            use_and_drop_subgroups()
            most = max(most, held()[0] - before)
        return most

    assert max(world3.run(come_and_go)) <= 4 * 6


def test_a_subgroup_in_use_is_kept_however_it_is_held(world3: World) -> None:
    """By a `Comm` on one rank only, a handle, or torch's group."""

    def hold() -> None:
        me = labkit.attach()
        for name in ("comm", "handle", "group"):
            half = Comm().subgroup([0, 1])
            if half is None:
                continue
            if name == "comm":
                setattr(me.state, "of_one" if me.rank == 0 else "other", half)
            elif name == "handle":
                me.state.x = torch.ones(1)
                me.state.handle = half.all_reduce(me.state.x, async_op=True)
            else:
                me.state.group = half.group
        if me.rank == 1:
            me.state.later, me.state.other = me.state.other, None

    def use() -> list[float]:
        me = labkit.attach()
        if me.rank == 2:
            return []
        me.state.handle.wait()
        x = torch.ones(1)
        torch.distributed.all_reduce(x, group=me.state.group)
        half = me.state.of_one if me.rank == 0 else me.state.later
        half.all_reduce(y := torch.ones(1))
        return [me.state.x.item(), x.item(), y.item()]

    world3.run(hold)
    world3.run(use_and_drop_subgroups, 3)
    assert world3.run(use) == [[2.0] * 3, [2.0] * 3, []]
    world3.run(forget, "handle")


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
