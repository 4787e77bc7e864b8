"""Drivers as scripts of their own, which are killed, interrupted, run out of something or end: no
process and no folder is left, and what was wrong is said."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from provoke import alive, driver, gone, servers, until
from tables import cases

pytestmark = pytest.mark.slow


# ---- killed drivers


@cases(
    ("fork", os.kill),
    ("fork", os.killpg),
    ("spawn", os.kill),
    ids=["forked", "whole group", "spawned"],
)
def test_only_children_outlive_a_killed_driver(start: str, kill: Any, tmp_path: Path) -> None:
    script = f"""
    import subprocess
    world = World(2, start={start!r}, transport="shm")
    def start():
        return os.getpid(), subprocess.Popen(["sleep", "600"]).pid
    say(*[pid for pids in world.run(start) for pid in pids])
    say(world.run(lambda: str(labkit.comm.here.shared))[0])
    quiet = {{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}}
    say(subprocess.Popen(["sleep", "600"], **quiet).pid)
    def work():
        while True:
            Comm().all_reduce(torch.ones(300_000))
    world.run(work)
    """
    with driver(script, tmp_path) as running:
        pids, shared, (child,) = running.hear_pids(), Path(running.hear()), running.hear_pids()
        try:
            assert len(pids) == 4 and all(map(alive, pids)) and shared.is_dir()
            pids += [process.pid for process in servers(psutil.Process(running.process.pid))]
            pids.remove(child)
            until(lambda: False, 0.5)
            kill(running.process.pid, signal.SIGKILL)
            assert gone(pids)
            assert until(lambda: not running.leftovers() and not shared.exists())
            assert alive(child) == (kill is os.kill), "an ordinary subprocess goes on"
        finally:
            if alive(child):
                os.kill(child, signal.SIGKILL)


@cases(("warm_up_early()", 0.0), ("warm_up_early()", 0.5), ("World(1).close()", 0.73))
def test_a_driver_killed_while_it_starts_a_world_leaves_nothing(
    begin: str, after_s: float, tmp_path: Path
) -> None:
    script = f"""
    from labkit.runtime.launch import warm_up_early
    {begin}
    say("begun")
    while True:
        World(3).close()
    """
    with driver(script, tmp_path) as running:
        running.hear()
        # Not any file: for a moment, Python tries the folder with a file of its own.
        assert until(lambda: any(running.folder.glob("labkit-*"))), "the world has its folder"
        until(lambda: False, after_s)
        running.kill(within_s=60 if "warm_up" in begin else 20)


def test_a_driver_with_a_closed_stdout_ends_and_leaves_nothing(tmp_path: Path) -> None:
    script = """
    with World(2) as world:
        say(*world.run(os.getpid))
        while True:
            world.run(lambda: [print("flood") for _ in range(1000)])
    """
    with driver(script, tmp_path) as running:
        pids = running.hear_pids()
        assert running.process.stdout is not None
        running.process.stdout.close()
        assert running.process.wait(30) != 0
        assert gone(pids) and not running.leftovers()


def test_the_end_of_a_script_closes_its_world_and_that_of_a_fork_does_not(tmp_path: Path) -> None:
    script = """
    world = World(2)
    child = os.fork()
    if child == 0:
        sys.exit()
    os.waitpid(child, 0)
    say(world.run(lambda: Comm().subgroup([0, 1]).size))  # needs the world's folder
    if os.fork() == 0:
        say(raises("", world.run, lambda: 1, error=RuntimeError))
        os._exit(0)
    os.wait()
    say(*world.run(os.getpid))
    """
    with driver(script, tmp_path) as running:
        assert running.hear() == "[2, 2]"
        assert "is a fork of process" in running.hear()
        pids = running.hear_pids()
        assert running.rest() == "" and running.process.returncode == 0
        assert gone(pids) and not running.leftovers(), "though nobody closed the world"


def test_attach_alone_is_a_world_of_one(tmp_path: Path) -> None:
    script = """
    me = labkit.attach()
    x = torch.ones(3)
    with labkit.listen() as events:
        me.comm.all_reduce(x)
    say(me.rank, me.size, x.tolist(), me is labkit.attach(), events[0].transport)
    with World(2) as world:  # a notebook that tried a strategy alone may still start ranks
        say(world.run(lambda: Comm().size))
    """
    with driver(script, tmp_path) as running:
        assert running.hear() == "0 1 [1.0, 1.0, 1.0] True gloo"
        assert running.hear() == "[2, 2]"
        assert running.rest() == "" and running.process.returncode == 0


# ---- interrupts


def test_interrupts_of_a_driver_are_answered_by_it_alone(tmp_path: Path) -> None:
    script = """
    flag = sys.argv[0] + ".hangs"
    def hang():
        open(flag, "w").close()
        time.sleep(600)
    with World(2) as world:
        say(*world.run(os.getpid))  # then the whole terminal is interrupted
        error = raises("", world.run, hang, error=KeyboardInterrupt)
        say(type(error).__name__, world.run(ones))

        results = []  # the main thread is interrupted, and a run goes on in another
        thread = threading.Thread(target=lambda: results.append(world.run(time.sleep, 1)))
        thread.start()
        say(type(interrupted(lambda: time.sleep(600), 0.3)).__name__)
        thread.join()
        say(results)

        raises("", world.run, lambda: os._exit(1), error=RankError)
        (server,) = psutil.Process().children()
        server.suspend()  # one interrupt, while ranks restart after a failure
        raised = interrupted(lambda: world.run(ones), 0.5)
        server.resume()
        say(type(raised).__name__, world.run(ones))
    """
    with driver(script, tmp_path) as running:
        pids = running.hear_pids()
        assert until(Path(f"{running.file}.hangs").exists)
        running.interrupt()
        assert running.hear() == "RankInterrupt [2.0, 2.0]"
        assert gone(pids)
        assert [running.hear() for _ in range(2)] == ["KeyboardInterrupt", "[[None, None]]"]
        assert running.hear().endswith("KeyboardInterrupt [2.0, 2.0]")
        assert running.rest() == "" and running.process.returncode == 0
        assert not running.leftovers()


def test_interrupts_at_any_moment_leave_what_works(tmp_path: Path) -> None:
    script = """
    with World(2) as world:  # many at once, in a run
        for k in range(4):
            pids = world.run(os.getpid)
            hail = [0.3 + 0.003 * k * j for j in range(8)]
            raised = interrupted(lambda: world.run(time.sleep, 600), *hail)
            say(isinstance(raised, KeyboardInterrupt), world.run(ones))
            say(*pids)
    def live():
        global world
        world = World(2)
        while True:
            world.run(ones)
    for k in range(20):  # one or two, at a birth or in a run
        world = None
        raised = interrupted(live, 0.006 * k, *[0.006 * k + 0.001] * (k % 2))
        say(isinstance(raised, KeyboardInterrupt), world is None or world.run(ones) == [2, 2])
        if world is not None:
            world.close()
        del raised
        say(len(os.listdir(os.environ["TMPDIR"])))
    with World(2) as world:
        say(world.run(ones))
    """
    with driver(script, tmp_path) as running:
        for _ in range(4):
            assert running.hear() == "True [2.0, 2.0]"
            assert gone(running.hear_pids())
        for _ in range(20):
            assert running.hear() == "True True"
            assert running.hear() == "0"
        assert running.hear() == "[2.0, 2.0]"
        (server,) = servers(psutil.Process(running.process.pid))
        assert running.rest() == "" and not running.leftovers() and gone([server.pid])


def test_a_killed_server_takes_its_ranks_with_it_and_a_new_one_comes(tmp_path: Path) -> None:
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 60,) * 2)
    say(raises("", World, 40))
    with World(2) as world, World(2) as idle:
        for kill in range(2):
            pids = [*world.run(os.getpid), *idle.run(os.getpid)]
            (server,) = psutil.Process().children()
            threading.Timer(0.3, server.kill).start()
            say(raises("server", world.run, time.sleep, 600, error=RankError).kind)
            say(world.run(lambda: Comm().rank))
            say(raises("", idle.run, lambda: 1, error=RankError).kind)
            say(idle.run(lambda: Comm().rank), *[psutil.pid_exists(pid) for pid in pids])
    sys.executable = "/bin/false"
    say(raises("", World, 2, start="spawn", error=RankError))
    (server,) = psutil.Process().children()
    server.kill()
    server.wait()
    say(raises("", World, 2, error=RuntimeError))
    """
    with driver(script, tmp_path) as running:
        assert "the limit on open files allows only" in running.hear()
        for _ in range(2):
            assert [running.hear() for _ in range(3)] == ["died", "[0, 1]", "died"]
            assert running.hear() == "[0, 1] False False False False"
        assert "rank 0 ended by itself with status 1" in running.hear()
        assert "the server that forks the ranks ended with status 1" in running.hear()
        assert running.rest() == "" and not running.leftovers()


# ---- a machine that has little


@contextmanager
def cgroup(kind: str, settings: dict[str, str]) -> Iterator[Path]:
    """A cgroup with those of the settings that its version has; skips where none can be made."""
    first, name = Path("/sys/fs/cgroup"), f"labkit-test-{os.getpid()}"
    if (first / kind).is_dir():  # version 1
        group = first / kind / name
    elif sys.platform == "linux":
        own = Path("/proc/self/cgroup").read_text().partition("0::")[2].strip().lstrip("/")
        group = first / own / name
    else:
        pytest.skip("cgroups are Linux's")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no {kind} cgroup can be made here: {error}")
    try:
        known = {file: value for file, value in settings.items() if (group / file).exists()}
        try:
            for file, value in known.items():
                (group / file).write_text(value)
        except OSError:  # version 2 wants the controller switched on above
            known = {}
        if not known:
            pytest.skip(f"the {kind} of a cgroup cannot be limited here")
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_a_world_or_a_rank_too_large_for_a_cgroup_is_named(tmp_path: Path) -> None:
    limit = "1000000000"
    settings = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit,
                "memory.max": limit, "memory.swap.max": "0"}  # fmt: skip
    with cgroup("memory", settings) as group:
        script = f"""
        Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
        say(raises("", World, 64))

        def eat():
            if Comm().rank == 1:  # which the kernel kills first, also on a loaded machine
                Path("/proc/self/oom_score_adj").write_text("1000")
                food = []
                while True:
                    food.append(torch.ones(10_000_000))
            Comm().barrier()

        with World(2) as world:
            error = raises("", world.run, eat, error=RankError)
            say(error.kind, error.ranks, str(error).replace("\\n", " "))
            say(world.run(lambda: Comm().rank))
        """
        with driver(script, tmp_path) as running:
            assert "64 ranks are too many for this machine" in running.hear()
            said, killed = running.hear(), "died (1,) rank 1 was killed by SIGKILL; "
            assert said.startswith(killed + "it had used up to "), said
            assert "The system ran out of memory and killed it: use fewer ranks" in said
            assert running.hear() == "[0, 1]"
            assert running.rest() == "" and not running.leftovers()


def test_processes_that_the_system_refuses_are_reported(tmp_path: Path) -> None:
    with cgroup("pids", {"pids.max": "max"}) as group:
        script = f"""
        World(1).close()
        (server,) = psutil.Process().children()
        group = Path({str(group)!r})
        (group / "cgroup.procs").write_text(str(server.pid))
        (group / "pids.max").write_text("3")
        say(raises("", World, 6, error=RuntimeError))
        (group / "pids.max").write_text("max")
        with World(6) as world:
            say(world.run(lambda: Comm().rank))
        """
        with driver(script, tmp_path) as running:
            assert "the system could not start 6 processes" in running.hear()
            assert running.hear() == "[0, 1, 2, 3, 4, 5]"
            assert running.rest() == "" and not running.leftovers()
