"""Two hundred faults of all kinds, one after the other, in one process: afterwards there is
nothing that was not there before."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from provoke import ranks_of_servers, servers, until

import labkit
from labkit import Comm, RankError, World

FAULTS = 200
FILES_BESIDE = 2  # that a driver or a server may come to hold, whatever the number of faults


def all_reduce(numel: int = 8) -> None:
    Comm().all_reduce(torch.ones(numel))


def on_the_last(fault: Callable[[], object]) -> None:
    """The last rank does something else than the others."""
    if Comm().rank == Comm().size - 1:
        fault()
    all_reduce()


def raised() -> None:
    on_the_last(lambda: 1 // 0)


def died(number: int) -> None:
    on_the_last(lambda: os.kill(os.getpid(), number))


def exited() -> None:
    on_the_last(lambda: os._exit(3))


def all_died() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disagreed() -> None:
    on_the_last(lambda: all_reduce(9))


def returned_early() -> None:
    if Comm().rank:
        all_reduce()


def circle() -> None:
    Comm().recv(torch.ones(1), (Comm().rank + 1) % Comm().size)


def unpicklable() -> object:
    return threading.Lock()


def hung() -> None:
    on_the_last(lambda: time.sleep(600))


def big_message_under_way() -> None:
    on_the_last(lambda: None)
    Comm().all_reduce(torch.ones(5_000_000))  # in many pieces
    on_the_last(lambda: os._exit(1))


def flooding() -> None:
    def flood() -> None:
        while True:
            print("flood" * 100)

    threading.Thread(target=flood, daemon=True).start()
    raised()


def with_children_and_shared_memory() -> None:
    import multiprocessing
    import subprocess

    labkit.attach().state.kept = [
        subprocess.Popen(["sleep", "600"]),
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True),
        torch.ones(1000).share_memory_(),
    ]
    labkit.attach().state.kept[1].start()
    raised()


KINDS: dict[str, tuple[Callable, tuple, str]] = {
    "raised": (raised, (), "raised"),
    "killed": (died, (signal.SIGKILL,), "died"),
    "crashed": (died, (signal.SIGSEGV,), "died"),
    "exited": (exited, (), "died"),
    "all died": (all_died, (), "died"),
    "disagreed": (disagreed, (), "disagree"),
    "returned early": (returned_early, (), "stuck"),
    "circle": (circle, (), "stuck"),
    "unpicklable": (unpicklable, (), "unpicklable"),
    "unpicklable argument": (print, (threading.Lock(),), "unpicklable"),
    "hung": (hung, (), "stuck"),
    "big message under way": (big_message_under_way, (), "died"),
    "flooding": (flooding, (), "raised"),
    "with children": (with_children_and_shared_memory, (), "raised"),
}


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def shared_names() -> set[str]:
    """What there is in shared memory, but for the worlds of other processes."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    own = f"labkit-{os.getpid()}-"
    return {name for name in names if name.startswith(own) or not name.startswith("labkit-")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_faults_leave_no_process_file_folder_or_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    World(1).close()  # the server is there from now on
    (server,) = servers()
    others = ranks_of_servers()  # those of fixtures of other tests
    (folder := tmp_path / "t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    shared_before = shared_names()
    family_before = descendants()
    files_before = psutil.Process().num_fds(), server.num_fds()
    threads_before = threading.active_count()

    chance = random.Random(0)
    begotten: set[int] = set()
    world = World(3, timeout_s=1)
    for k in range(FAULTS):
        name = chance.choice(sorted(KINDS))
        fn, args, kind = KINDS[name]
        try:
            with pytest.raises(RankError) as info:
                world.run(fn, *args)
            assert info.value.kind == kind
            begotten |= descendants()
            assert world.run(lambda: Comm().rank) == [0, 1, 2]
        except BaseException as error:
            error.add_note(f"fault {k}: {name}")
            raise
        if k % 20 == 0:  # worlds come and go, too
            world.close()
            world = World(3, timeout_s=1)
        capsys.readouterr()
    world.close()

    def left() -> set[int]:
        return {pid for pid in begotten | descendants() if psutil.pid_exists(pid)} - family_before

    until(lambda: not left())
    assert not left()
    assert servers() == [server] and ranks_of_servers() == others
    assert not os.listdir(folder)
    assert until(lambda: shared_names() <= shared_before)
    assert psutil.Process().num_fds() <= files_before[0] + FILES_BESIDE
    assert server.num_fds() <= files_before[1] + FILES_BESIDE
    assert threading.active_count() == threads_before
