"""Messages over sockets of labkit's own. The contract of every back is run over them in
test_comm.py; here is what is theirs alone: long messages, the order of what comes, and what happens
when an end does not come, is gone, or is a stranger."""

import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from provoke import ROOT, until

from labkit import Comm, CommError, RankError, World
from labkit.comm.tcp import LOOPBACK, Post, ends, own_host, post
from labkit.comm.tcp.ends import HEAD, Key, Message, Reader, Writer

Sockets = Callable[[], tuple[socket.socket, socket.socket]]
LONG = 3 * post.SOCKET_BYTES  # elements of fp32: far more than a socket takes at once


@pytest.fixture(scope="module")
def world2() -> Iterator[World]:
    with World(2, transport="tcp") as world:
        yield world


def long_of(rank: int, k: int) -> torch.Tensor:
    return torch.arange(LONG, dtype=torch.float32) * (k + 1) + rank


def both_send_first() -> None:
    """Long messages and short ones, of several tags, before either receives."""
    comm = Comm()
    other = 1 - comm.rank
    sends = []
    for k in range(6):
        sends.append(comm.isend(long_of(comm.rank, k), other, tag=k % 2))
        sends.append(comm.isend(torch.tensor([k, comm.rank]), other, tag=7))
    for send in sends[:3]:
        send.wait()
    for k in reversed(range(6)):  # in another order than they were sent
        comm.recv(x := torch.empty(2, dtype=torch.int64), other, tag=7)
        assert x.tolist() == [5 - k, other]
    for k in (1, 3, 5, 0, 2, 4):
        comm.recv(x := torch.empty(LONG), other, tag=k % 2)
        assert x.equal(long_of(other, k)), k
    for send in sends:
        send.wait()
        assert send.is_completed()


def test_long_and_short_messages_arrive_whole_and_in_the_order_of_their_tag(world2: World) -> None:
    world2.run(both_send_first)


def test_a_message_travels_while_both_ends_do_something_else(world2: World) -> None:
    def busy() -> None:
        comm = Comm()
        x = long_of(0, 0) if comm.rank == 0 else torch.empty(LONG)
        handle = comm.isend(x, 1) if comm.rank == 0 else comm.irecv(x, 0)
        until_s = time.monotonic() + 10
        while not handle.is_completed() and time.monotonic() < until_s:
            time.sleep(0.001)  # nobody waits for it
        assert handle.is_completed()
        handle.wait()
        assert x.equal(long_of(0, 0))

    world2.run(busy)


def test_groups_of_the_same_ranks_share_their_connections(world2: World) -> None:
    def threads() -> tuple[int, int]:
        comm = Comm()
        comm.all_reduce(torch.ones(LONG))
        before = threading.active_count()
        for _ in range(3):
            same = comm.subgroup([1, 0])
            assert same is not None
            same.all_reduce(x := torch.full((LONG,), float(comm.rank)))
            assert x.eq(1).all()
        return before, threading.active_count()

    for before, after in world2.run(threads):
        assert after <= before


def test_nothing_is_kept_of_a_message_that_is_over(world2: World) -> None:
    def kept() -> tuple[list[bool], list[int]]:
        from labkit.comm import here  # this rank's own

        comm = Comm()
        other = 1 - comm.rank
        seen = []
        for k in range(3):
            sent, got = long_of(comm.rank, k), torch.empty(LONG)
            seen += [weakref.ref(sent), weakref.ref(got)]
            handles = [comm.isend(sent, other, tag=k), comm.irecv(got, other, tag=k)]
            for handle in handles:
                handle.wait()
            comm.all_reduce(got)
        del sent, got, handles, handle
        comm.barrier()
        gc.collect()
        assert here.post is not None
        reader = here.post.reader(other)
        return [one() is None for one in seen], [
            len(reader._wanted._queues),
            len(reader._kept._queues),
        ]

    for gone, left in world2.run(kept):
        assert all(gone), gone
        assert left == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["barrier", "async", "recv", "irecv"])
def test_a_rank_that_does_not_come_in_time_is_an_error_of_the_door(call: str) -> None:
    def alone() -> None:
        comm = Comm()
        if comm.rank == 1:
            time.sleep(600)
        x = torch.ones(3)
        if call == "barrier":
            comm.barrier()
        elif call == "async":
            handle = comm.all_reduce(x, async_op=True)
            assert handle is not None
            handle.wait()
        else:
            comm.recv(x, 1) if call == "recv" else comm.irecv(x, 1).wait()

    told = pytest.raises(RankError, match="(?s)failed: Timed out waiting 1.5 s for the message")
    with World(2, transport="tcp", timeout_s=0.5, check=False) as world, told:
        world.run(alone)


def test_who_goes_on_after_an_error_gets_an_error_and_no_numbers(tmp_path: Path) -> None:
    def go_on() -> list[str]:
        comm, heard = Comm(), []
        while comm.rank == 1 and not (tmp_path / "given up").exists():
            time.sleep(0.01)
        for _ in range(3):
            try:
                comm.all_reduce(x := torch.ones(LONG))
                heard.append(str(x[0]))
            except CommError as error:
                heard.append(str(error))
            (tmp_path / "given up").touch()
        return heard

    with World(2, transport="tcp", timeout_s=0.5, check=False) as world:
        early, late = world.run(go_on)
    assert all("failed: " in heard for heard in (*early, *late)), (early, late)
    assert "Timed out waiting 1.5 s for the message from rank 1" in early[0]
    for heard in (*early[1:], *late[1:]):
        assert "of no more use" in heard and "World.restart()" in heard


def test_a_message_of_another_length_is_an_error() -> None:
    def mismatch() -> None:
        comm = Comm()
        if comm.rank == 0:
            comm.send(torch.ones(2), 1)
        else:
            comm.recv(torch.ones(3), 0)

    told = pytest.raises(RankError, match="a message of 8 bytes came for a tensor of 12")
    with World(2, transport="tcp", check=False) as world, told:
        world.run(mismatch)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_killed_in_the_middle_takes_the_others_along(asynchronous: bool) -> None:
    def until_killed() -> None:
        comm = Comm()
        for k in range(10_000):
            if comm.rank == 1 and k == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            handle = comm.all_reduce(torch.ones(300_000), async_op=asynchronous)
            if handle is not None:
                handle.wait()

    with World(3, transport="tcp") as world:
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            world.run(until_killed)
        assert world.run(lambda: Comm().rank) == [0, 1, 2]


def test_an_end_that_is_gone_is_named() -> None:
    def left_alone() -> str:
        comm = Comm()
        comm.barrier()
        if comm.rank == 1:
            from labkit.comm import here  # this rank's own

            assert here.post is not None
            ends.end(here.post.writer(0)._connection)  # type: ignore[arg-type]
            return ""
        with pytest.raises(
            CommError, match="no message comes from rank 1 any more: it has closed"
        ) as told:
            comm.recv(torch.ones(3), 1)
        return str(told.value)

    with World(2, transport="tcp", check=False) as world:
        assert "recv" in world.run(left_alone)[0]


# --- one end at a time ----------------------------------------------------------------------------


@pytest.fixture
def posts() -> Iterator[tuple[dist.Store, Post, Post]]:
    store, zero, one = made_by_all(dist.HashStore())
    yield store, zero, one
    zero.close(), one.close()


def made_by_all(store: Any) -> tuple[dist.Store, Post, Post]:
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(Post, store, rank, 2, LOOPBACK, 5.0) for rank in range(2)]
    return store, made[0].result(), made[1].result()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Makes connected sockets, and closes them after the test."""
    with ExitStack() as opened:

        def make() -> tuple[socket.socket, socket.socket]:
            ours, theirs = socket.socketpair()
            return opened.enter_context(ours), opened.enter_context(theirs)

        yield make


def as_bytes(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


def test_a_stranger_is_not_listened_to(posts: tuple[Any, Post, Post]) -> None:
    _, zero, one = posts
    host, port, token = zero._places[1]
    for shown in (secrets.token_bytes(16), b"", bytes.fromhex(token)[:8]):
        with suppress(OSError), socket.create_connection((host, port)) as stranger:
            stranger.sendall(post.HELLO.pack(shown, 0)[: len(shown) + 8])
            stranger.sendall(HEAD.pack(1, 2, 3) + b"abc")
            stranger.shutdown(socket.SHUT_WR)
    wanted = one.reader(0).receive(Key(1, 2), x := as_bytes(0, 0, 0))
    zero.writer(1).send(Key(1, 2), as_bytes(4, 5, 6)).wait()
    wanted.wait()
    assert x.tolist() == [4, 5, 6]


def test_a_message_that_nobody_wants_yet_is_kept_for_its_group_and_tag(
    posts: tuple[Any, Post, Post],
) -> None:
    _, zero, one = posts
    for k, key in enumerate((Key(1, 1), Key(2, 1), Key(1, 2), Key(1, 1))):
        zero.writer(1).send(key, as_bytes(k)).wait()
    for expected, key in ((2, Key(1, 2)), (1, Key(2, 1)), (0, Key(1, 1)), (3, Key(1, 1))):
        one.reader(0).receive(key, x := as_bytes(9)).wait()
        assert x.tolist() == [expected]


def test_a_send_that_cannot_leave_in_time_is_an_error(sockets: Sockets) -> None:
    """The other end takes nothing out."""
    ours, theirs = sockets()
    writer = Writer(1, lambda: ours, timeout_s=0.2, broken=lambda problem: writer.fail(problem))
    stuck = writer.send(Key(0, 0), torch.zeros(64 << 20, dtype=torch.uint8))
    behind = writer.send(Key(0, 0), as_bytes(1))
    assert not stuck.is_completed() and not behind.is_completed()
    for message in (stuck, behind):
        with pytest.raises(RuntimeError, match="0.2 s for the message to rank 1 to leave"):
            message.wait()
    with pytest.raises(RuntimeError, match="of no more use"):
        writer.send(Key(0, 0), as_bytes(1))
    theirs.close()


def test_nobodys_tensor_is_written_after_its_error(sockets: Sockets) -> None:
    ours, theirs = sockets()
    reader = Reader(1, timeout_s=0.2, broken=lambda problem: reader.fail(problem))
    threading.Thread(target=reader.read, args=(ours,), daemon=True).start()
    wanted = reader.receive(Key(0, 0), x := as_bytes(0, 0, 0, 0))
    theirs.sendall(HEAD.pack(0, 0, 4) + b"\1\2")  # half of it
    with pytest.raises(RuntimeError, match="Timed out waiting 0.2 s for the message from rank 1"):
        wanted.wait()
    before = x.tolist()
    with pytest.raises(OSError):
        for _ in range(100):
            theirs.sendall(b"\3\4")
            time.sleep(0.01)
    assert x.tolist() == before
    with pytest.raises(RuntimeError, match="of no more use"):
        reader.receive(Key(0, 0), x)


def test_who_never_called_is_waited_for_and_not_listened_to_later(sockets: Sockets) -> None:
    reader = Reader(1, timeout_s=0.1, broken=lambda problem: reader.fail(problem))
    with pytest.raises(RuntimeError, match="Timed out"):
        reader.receive(Key(0, 0), x := as_bytes(0)).wait()
    ours, theirs = sockets()
    theirs.sendall(HEAD.pack(0, 0, 1) + b"\1")
    reader.read(ours)  # returns
    assert x.tolist() == [0]


def test_a_rank_that_is_not_there_is_an_error(posts: tuple[Any, Post, Post]) -> None:
    _, zero, _ = posts
    zero._places[1] = LOOPBACK, 1, "00"
    told = r"no message reaches rank 1 any more: .*refused.* \(127.0.0.1, port 1\); .*start the"
    with pytest.raises(RuntimeError, match=told):
        zero.writer(1).send(Key(0, 0), as_bytes(1))


def test_who_comes_without_one_is_named() -> None:
    with pytest.raises(
        RuntimeError, match="rank 1 did not say where it listens within 0.2 s; has it"
    ):
        Post(dist.HashStore(), 0, 2, LOOPBACK, 0.2)


def test_a_second_world_at_the_same_store_has_its_own() -> None:
    store, zero, one = made_by_all(dist.HashStore())
    zero.close(), one.close()
    with pytest.raises(RuntimeError, match="has left its world"):
        zero.writer(1)
    _, zero, one = made_by_all(store)
    zero.writer(1).send(Key(0, 0), as_bytes(5)).wait()
    one.reader(0).receive(Key(0, 0), x := as_bytes(0)).wait()
    assert x.tolist() == [5]
    zero.close(), one.close()


def pair(sockets: Sockets, timeout_s: float = 5.0) -> tuple[Reader, socket.socket]:
    """A reader that reads, and the socket at its other end."""
    ours, theirs = sockets()
    reader = Reader(1, timeout_s, broken=lambda problem: reader.fail(problem))
    threading.Thread(target=reader.read, args=(ours,), daemon=True).start()
    return reader, theirs


def test_a_reader_that_has_no_memory_tells_who_waits(sockets: Sockets) -> None:
    reader, theirs = pair(sockets)
    wanted = reader.receive(Key(0, 0), as_bytes(0))
    with patch.object(ends.torch, "empty", side_effect=RuntimeError("not enough memory")):
        theirs.sendall(HEAD.pack(0, 0, 2) + b"ab")
        with pytest.raises(RuntimeError, match="not enough memory"):
            wanted.wait()


def test_a_message_that_is_kept_reaches_an_inference_tensor(sockets: Sockets) -> None:
    reader, theirs = pair(sockets)
    theirs.sendall(HEAD.pack(0, 0, 2) + b"a")
    until(lambda: reader._arriving is not None)
    with torch.inference_mode():
        wanted = reader.receive(Key(0, 0), x := as_bytes(0, 0))
        theirs.sendall(b"b")
        wanted.wait()
    assert x.tolist() == [*b"ab"]


def test_after_an_interrupt_in_the_middle_of_a_send_nothing_else_leaves(sockets: Sockets) -> None:
    ours, theirs = sockets()
    writer = Writer(1, lambda: ours, timeout_s=5.0, broken=lambda problem: writer.fail(problem))

    def interrupted(*given: Any) -> int:
        at_once(*given)
        raise KeyboardInterrupt

    with patch.object(ends, "_at_once", interrupted), pytest.raises(KeyboardInterrupt):
        writer.send(Key(0, 0), as_bytes(1))
    with pytest.raises(RuntimeError, match="KeyboardInterrupt; the connections are of no more use"):
        writer.send(Key(0, 0), as_bytes(1))
    assert len(theirs.recv(1000)) == HEAD.size + 1 and theirs.recv(1000) == b""


def test_one_that_is_too_late_ends_all_connections(posts: tuple[Any, Post, Post]) -> None:
    """What else is under way belongs to the same operation: its tensors are not written later."""
    zero = posts[1]
    zero._timeout_s = 0.2
    also = zero.reader(0).receive(Key(0, 1), x := as_bytes(0))
    with pytest.raises(RuntimeError, match="Timed out waiting 0.2 s for the message from rank 1"):
        zero.reader(1).receive(Key(0, 0), as_bytes(0)).wait()
    with pytest.raises(RuntimeError, match="Timed out"):
        also.wait()
    for end in (zero.reader, zero.writer):
        with pytest.raises(RuntimeError, match="of no more use"):
            end(0) if end is zero.writer else end(0).receive(Key(0, 0), x)
    assert x.tolist() == [0]


# --- where it is asked for ------------------------------------------------------------------------


def test_the_address_is_the_one_towards_the_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert own_host() == LOOPBACK
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert own_host().startswith("127.")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(
        ValueError, match="MASTER_ADDR=127.0.0.5 is 127.* which others cannot reach"
    ):
        own_host()


@pytest.mark.slow
def test_under_torchrun_the_environment_asks_for_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import labkit, torch\nwith labkit.listen() as events:\n"
        "    comm = labkit.attach().comm\n    comm.all_reduce(x := torch.ones(300_000))\n"
        "    half = comm.subgroup([0, 2])\n    half and half.all_reduce(x)\n"
        "print(f'{events[-1].transport} {x[-1].item()}\\n', end='', flush=True)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LABKIT_TRANSPORT": "tcp"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, env=env)
    assert sorted(done.stdout.split("\n")) == ["", "tcp 3.0", "tcp 6.0", "tcp 6.0"], done.stderr


# --- faults that must not pass --------------------------------------------------------------------


def from_the_beginning(connection: socket.socket, head: bytes, data: memoryview) -> int:
    """Says that nothing has left, and some has."""
    at_once(connection, head, data)
    return 0


def of_any_tag(reader: Reader, key: Key, x: torch.Tensor) -> Message:
    return receive(reader, Key(key.group, 0), x)


at_once, receive = ends._at_once, Reader.receive
FAULTS = [
    pytest.param((ends, "_at_once", from_the_beginning), id="a part is sent twice"),
    pytest.param((Reader, "receive", of_any_tag), id="tags are not looked at"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: tuple[Any, str, Any]) -> None:
    def with_fault() -> None:
        with patch.object(*fault):
            both_send_first()

    with World(2, transport="tcp", timeout_s=2) as world, pytest.raises(RankError):
        world.run(with_fault)
