"""Many worlds with faults of all kinds, interrupts and kills, one after the other, in one process:
afterwards there is no process, descriptor, thread or file that was not there before."""

import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import psutil
import pytest
import torch

import labkit
from labkit import Comm, RankError, World
from labkit.runtime.launch import ForkServer
from provoke import alive, driver, gone, interrupted, until
from tables import raises

WORLDS = int(os.environ.get("LABKIT_SOAK_WORLDS", "200"))
SEED = int(os.environ.get("LABKIT_SOAK_SEED", "0"))


def all_reduce(numel: int = 8) -> None:
    Comm().all_reduce(torch.ones(numel))


def on_the_last(fault: Callable[[], object]) -> None:
    """The last rank does something else than the others."""
    if Comm().rank == Comm().size - 1:
        fault()
    all_reduce()


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def big_message_under_way() -> None:
    on_the_last(lambda: None)
    Comm().all_reduce(torch.ones(5_000_000))  # in many pieces
    on_the_last(lambda: os._exit(1))


def flooding() -> None:
    def flood() -> None:
        while True:
            print("flood" * 100)

    threading.Thread(target=flood, daemon=True).start()
    on_the_last(lambda: 1 // 0)


def with_children_and_shared_memory() -> None:
    labkit.attach().state.kept = [
        subprocess.Popen(["sleep", "600"]),
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True),
        torch.ones(1000).share_memory_(),
    ]
    labkit.attach().state.kept[1].start()
    on_the_last(lambda: 1 // 0)


def came_and_went() -> None:
    """Of subgroups, one kept by the state of a rank that is killed."""
    for _ in range(3):
        half = Comm().subgroup([0, 1])
        if half is not None:
            half.all_reduce(torch.ones(2))
    labkit.attach().state.half = half
    on_the_last(lambda: 1 // 0)


KINDS: dict[str, tuple[Callable[..., object], str]] = {
    "raised": (lambda: on_the_last(lambda: 1 // 0), "raised"),
    "killed": (lambda: on_the_last(lambda: die(signal.SIGKILL)), "died"),
    "crashed": (lambda: on_the_last(lambda: die(signal.SIGSEGV)), "died"),
    "exited": (lambda: on_the_last(lambda: os._exit(3)), "died"),
    "all died": (lambda: die(signal.SIGKILL), "died"),
    "disagreed": (lambda: on_the_last(lambda: all_reduce(9)), "disagree"),
    "returned early": (lambda: all_reduce() if Comm().rank else None, "stuck"),
    "circle": (lambda: Comm().recv(torch.ones(1), (Comm().rank + 1) % Comm().size), "stuck"),
    "unpicklable": (threading.Lock, "unpicklable"),
    "unpicklable argument": (partial(print, threading.Lock()), "unpicklable"),
    "hung": (lambda: on_the_last(lambda: time.sleep(600)), "stuck"),
    "big message under way": (big_message_under_way, "died"),
    "flooding": (flooding, "raised"),
    "subgroups": (came_and_went, "raised"),
    "with children": (with_children_and_shared_memory, "raised"),
}


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def shared_names() -> set[str]:
    """What there is in shared memory, but for the worlds of other processes."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    own = f"labkit-{os.getpid()}-"
    return {name for name in names if name.startswith(own) or not name.startswith("labkit-")}


def server() -> psutil.Process:
    assert ForkServer._only is not None
    return psutil.Process(ForkServer._only._process.pid)


class Soak:
    """Each method but `works` does something bad to one or two worlds, and sees to it that the next
    thing works."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.begotten: set[int] = set()
        self.faults: list[str] = []  # each kind once, before the first comes again

    def works(self, world: World) -> None:
        self.begotten |= descendants()
        assert world.run(lambda: Comm().rank) == list(range(world.size))

    def fault(self) -> str:
        self.faults = self.faults or self.chance.sample(sorted(KINDS), len(KINDS))
        name = self.faults.pop()
        fn, kind = KINDS[name]
        # Only a hang needs a short timeout; on a loaded machine a death may take a second.
        with World(self.chance.choice((2, 3)), timeout_s=1 if kind == "stuck" else 20) as world:
            assert raises("", world.run, fn, error=RankError).kind == kind, name
            if self.chance.random() < 0.5:
                self.works(world)
        return name

    def interrupted_start(self) -> str:
        kept: list[World] = []
        moments_s = [self.chance.uniform(0.0, 0.15) for _ in range(self.chance.choice((1, 3)))]
        raised = interrupted(lambda: kept.append(World(3)), *moments_s)
        assert kept or raised is not None
        for world in kept:
            self.works(world)
            world.close()
        return f"interrupts at {moments_s}"

    def interrupted_run(self) -> str:
        moments_s = [self.chance.uniform(0.0, 0.2) for _ in range(self.chance.choice((1, 3)))]
        with World(2) as world:
            raised = interrupted(lambda: world.run(time.sleep, 600), *moments_s)
            assert raised is not None
            self.works(world)
        return f"interrupts at {moments_s}"

    def killed_server_and_interrupted_first_start(self) -> str:
        with World(2) as world:
            self.works(world)
            killed = server()
            killed.kill()
            if self.chance.random() < 0.5:
                raises("", world.run, all_reduce, error=RankError)
        assert gone([killed.pid])  # a signal takes its time to arrive
        bounds_s = ((0.05, 1.5), (0.15, 0.4), (0.15, 0.4))
        moments_s = list(accumulate(self.chance.uniform(*bounds) for bounds in bounds_s))
        kept: list[World] = []
        interrupted(lambda: kept.append(World(3)), *moments_s)
        for world in kept:
            world.close()
        with World(2) as world:
            self.works(world)
        return f"interrupts at {moments_s}"

    def killed_driver(self, folder: Path) -> str:
        script = """
        from labkit.runtime.launch import warm_up_early
        warm_up_early()
        say("begun")
        while True:
            with World(2) as world:
                world.run(lambda: 1)
        """
        lives_s = self.chance.uniform(0.0, 4.0)
        folder.mkdir()
        with driver(script, folder) as running:
            running.hear()
            time.sleep(lives_s)
            running.kill(within_s=60)
        return f"killed after {lives_s} s"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_worlds_with_faults_leave_no_process_descriptor_thread_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    World(1).close()  # the server is there from now on
    (folder := tmp_path / "t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))  # else in TMPDIR
    shared_before = shared_names()
    family_before = descendants() - {server().pid}
    files_before = psutil.Process().num_fds(), server().num_fds()
    threads_before = threading.active_count()

    soak = Soak(SEED)
    for k in range(WORLDS):
        drawn = soak.chance.random()
        try:
            if k % 30 == 25:
                done = soak.killed_driver(tmp_path / f"driver{k}")
            elif k % 30 == 10:
                done = soak.killed_server_and_interrupted_first_start()
            elif drawn < 0.2:
                done = soak.interrupted_start()
            elif drawn < 0.35:
                done = soak.interrupted_run()
            else:
                done = soak.fault()
        except BaseException as error:
            error.add_note(f"world {k} of seed {SEED}")
            raise
        capsys.readouterr()
        assert not os.listdir(folder), f"world {k} of seed {SEED}: {done}"

    def left() -> set[int]:
        everyone = soak.begotten | descendants()
        return {pid for pid in everyone if alive(pid)} - family_before - {server().pid}

    assert until(lambda: not left()), left()
    assert until(lambda: shared_names() <= shared_before)
    assert psutil.Process().num_fds() == files_before[0]
    assert server().num_fds() == files_before[1]
    assert until(lambda: threading.active_count() <= threads_before)
