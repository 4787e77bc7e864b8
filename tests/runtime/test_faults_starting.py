"""Interrupts while a world starts, in a real Jupyter kernel and here."""

import os
import random
import socket
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

import labkit
from labkit import Comm, RankInterrupt, World
from labkit.runtime.launch import ForkServer
from provoke import interrupted, shared_folders, until
from test_magics import Kernel, kernel_fixture, output_of, text_of

ROUNDS = 4
NEW_SERVER = (
    "from labkit import Comm, World\n"
    "from labkit.runtime.launch import ForkServer\n"
    "if ForkServer._only: ForkServer._only.close()"
)


kernel = kernel_fixture()


def no_children(process: psutil.Process) -> bool:
    return not process.children()


def left_by(kernel: Kernel) -> list[str]:
    """Folders of worlds in the kernel's TMPDIR and in shared memory."""
    pid = kernel.manager.provisioner.pid
    own = [name for name in os.listdir(kernel.folder) if name.startswith(f"labkit-{pid}-")]
    return own + shared_folders(pid)


@pytest.mark.timeout(300)
def test_three_interrupts_during_the_first_start_leave_only_the_server(kernel: Kernel) -> None:
    chance = random.Random(21)
    process = psutil.Process(kernel.manager.provisioner.pid)
    interrupted_count = 0
    for k in range(4 * ROUNDS):  # on a loaded machine some interrupts come too late
        if k >= ROUNDS and interrupted_count > ROUNDS // 2:
            break
        early = chance.random() < 0.5
        bounds_s = ((0.1, 1.2 if k < ROUNDS else 0.3), (0.15, 0.4), (0.15, 0.4))
        moments_s = [chance.uniform(*bounds) for bounds in bounds_s]
        kernel.run(NEW_SERVER + ("\nForkServer.get(early=True)" if early else ""))
        request = kernel.begin("world = World(2)")
        for pause_s in moments_s:
            time.sleep(pause_s)
            kernel.manager.interrupt_kernel()
        error = text_of([output_of(message) for message in kernel.messages(request)], "error")
        where = f"round {k}, early={early}, interrupts after {moments_s} s, then: {error}"
        assert not error or "KeyboardInterrupt" in error, where
        interrupted_count += bool(error)
        outputs = kernel.run("with World(3) as w:\n    r = w.run(lambda: Comm().rank)\nr")
        assert text_of(outputs) == "[0, 1, 2]", (where, outputs)
        kernel.run("world.close()" if not error else "")
        (server,) = process.children()
        assert until(partial(no_children, server)), where
        assert until(lambda: not left_by(kernel)), where
    assert interrupted_count > ROUNDS // 2, "the interrupts came too late to prove anything"


def test_a_first_start_says_what_it_does_until_it_is_over(kernel: Kernel) -> None:
    kernel.run(NEW_SERVER)
    kernel.run("import sys; sys.modules['labkit.runtime.progress'].NOTICE_S = 0.1")
    shown = text_of(kernel.run("with World(2): pass"), "stdout")
    assert "\rstarting ranks" in shown and "importing torch takes a while" in shown
    last_line = shown.split("\r")[-1].strip()
    assert last_line.startswith("2 ranks, gloo"), "the notice has disappeared"


def test_a_cancelled_request_ends_its_ranks_though_its_reply_came_late() -> None:
    World(1).close()
    assert ForkServer._only is not None
    server = psutil.Process(ForkServer._only._process.pid)
    server.suspend()  # it will read the request after the interrupt
    with (
        patch.object(ForkServer, "ends", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        World(2)
    server.resume()
    with World(3) as world:
        assert world.run(lambda: Comm().rank) == [0, 1, 2]
    assert until(partial(no_children, server))


@pytest.mark.parametrize("way", ["take", "finish"])
def test_one_interrupt_stops_a_message_that_a_rank_does_not(way: str) -> None:
    def answer_half(_: bytes) -> None:
        labkit.attach().control.sock.sendall((2).to_bytes(8, "little"))
        time.sleep(600)

    with World(2) as world:
        if way == "take":
            psutil.Process(world._ranks().pids[0]).suspend()
        message = (len, bytes(50_000_000)) if way == "take" else (answer_half, b"")
        assert isinstance(interrupted(lambda: world.run(*message), 1.0), RankInterrupt)
        assert world.run(lambda: Comm().rank) == [0, 1]


def test_a_long_temporary_folder_opens_no_port_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    ports: list[object] = []

    class Noted(socket.socket):
        def bind(self, address: object) -> None:
            ports.append(address)
            super().bind(address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "socket", Noted)
    pattern = f"labkit-{os.getpid()}-*"
    before = set(Path("/tmp").glob(pattern))
    with World(2) as world:
        assert world.run(lambda: Comm().rank) == [0, 1]
    (address,) = ports
    assert str(address).startswith("/tmp/labkit-"), "a file, and no port"
    assert not os.listdir(folder)
    assert set(Path("/tmp").glob(pattern)) == before


def test_a_notice_shows_after_its_time_and_disappears(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = sys.modules["labkit.runtime.progress"]  # the package has a function of this name
    monkeypatch.setattr(progress, "interactive", lambda: True)
    with progress.notice("starting") as tick:
        tick()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(progress, "NOTICE_S", 0.0)
    with progress.notice("starting") as tick:
        tick()
        tick()
    assert capsys.readouterr().out == "\rstarting\r        \r"
