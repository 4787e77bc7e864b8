"""Shared memory between the ranks of a world. The contract of every back is run over it in
test_comm.py; here it is run with slots and rings of a few hundred bytes, so that everything is in
pieces, and here is what this transport promises beyond it."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import comm_contract
import labkit.comm
from comm_contract import PLAIN, check, reduced, wait_for
from labkit import Comm, CommError, Mesh, RankError, RankInterrupt, World, listen
from labkit.comm import here
from labkit.runtime import folders
from labkit.runtime.transports.shm import collectives, region, ring, slots
from labkit.runtime.transports.shm.ring import Inbox, Outbox
from provoke import gone, interrupted, shared_folders
from tables import raises
from test_transport import transports
from worlds import on_each_rank, on_ranks_of_its_own, world_fixture

MEMORY = Path("/dev/shm")
SLOT = slots.SLOT_BYTES
LENGTHS = (0, 1, 3, 1000, 8192, 8193, SLOT // 4 - 1, SLOT // 4, SLOT // 4 + 1, 3 * SLOT // 4 + 5)


# As the suite's, also where LABKIT_TRANSPORT has the rest of it run over gloo.
world2 = world_fixture(2, transport="shm")
world3 = world_fixture(3, transport="shm")
world4 = world_fixture(4, transport="shm")


def in_shared_memory() -> set[str]:
    return set(shared_folders(os.getpid()))


def with_tiny_pieces() -> None:
    """Slots of 1 KiB, rings of 256 bytes: before the first operation of a world."""
    slots.SLOT_BYTES, collectives.AT_ONCE_BYTES = 1024, 64
    ring.RING_BYTES, ring.GRAIN_BYTES, ring.MAX_UNTAKEN = 256, 64, 16


# --- results -----------------------------------------------------------------------------------


@on_each_rank("world2")
def test_an_algorithm_with_a_name_is_one_of_messages() -> None:
    comm, names = Comm(), ("", "tree", "slots", "ring", "")
    with listen() as events:
        xs = [torch.ones(500_000) for _ in names]
        handles = [comm.all_reduce(x, "sum", True, name) for x, name in zip(xs, names)]
        comm.barrier()
        wait_for(handles)
    used, slots = [(event.algorithm, event.transport) for event in events], ("slots", "shm")
    assert used == [slots, ("tree", "gloo"), slots, ("ring", "gloo"), slots, slots]
    said = str(comm.explain("broadcast", 8))
    assert said.startswith("broadcast by slots: the ranks share memory. Over gloo it would be")
    said = str(comm.explain("broadcast", 8, "chain"))
    assert said == "broadcast by chain: the call requests it"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_contract_in_tiny_pieces(size: int) -> None:
    def tiny() -> None:
        with_tiny_pieces()
        (comm_contract.check_thoroughly if size == 4 else check)(Comm())

    with World(size, transport="shm") as world:
        world.run(tiny)


@pytest.mark.slow
@on_ranks_of_its_own(8, transport="shm")
def test_eight_ranks_on_few_cores() -> None:
    for part in comm_contract.CONTRACT[:-1]:
        part(Comm())


def ours_and_gloos(op: str) -> list[torch.Tensor]:
    """The results of an all-reduce of arbitrary numbers, for every length."""
    comm, results = Comm(), []
    for numel in LENGTHS:
        rows = torch.randn(comm.size, numel, generator=torch.Generator().manual_seed(numel))
        ours, gloos = rows[comm.rank].clone(), rows[comm.rank].clone()
        comm.all_reduce(ours, op)
        assert torch.equal(ours, reduced(list(rows), op)), numel
        torch_op = {"mean": "SUM", "sum": "SUM", "product": "PRODUCT"}.get(op, op.upper())
        dist.all_reduce(gloos, getattr(dist.ReduceOp, torch_op))
        torch.testing.assert_close(ours, gloos / comm.size if op == "mean" else gloos)
        results.append(ours)
    return results


@pytest.mark.parametrize("op", PLAIN)
def test_results_are_gloos_and_equal_on_all_ranks_to_the_bit(world4: World, op: str) -> None:
    first, *others = world4.run(ours_and_gloos, op)
    for results in others:
        assert all(map(torch.equal, first, results))


@on_each_rank("world4")
def test_a_reduce_and_a_reduce_scatter_have_the_same_bits() -> None:
    comm = Comm()
    rows = torch.randn(comm.size, 4 * 300_001, generator=torch.Generator().manual_seed(0))
    total, root, part = rows[comm.rank].clone(), rows[comm.rank].clone(), torch.empty(300_001)
    comm.all_reduce(total)
    comm.reduce(root, dst=3)
    comm.reduce_scatter_tensor(part, rows[comm.rank])
    assert torch.equal(root, total if comm.rank == 3 else rows[comm.rank])
    assert torch.equal(part, total.chunk(4)[comm.rank])


@on_each_rank("world2")
def test_it_works_inside_and_outside_inference_mode() -> None:
    comm = Comm()
    for _ in range(3):
        with torch.inference_mode():
            comm.all_reduce(torch.ones(100_001))
        x = torch.ones(100_001)
        comm.all_reduce(x)
        assert torch.equal(x, torch.full_like(x, 2))


@on_each_rank("world4")
def test_bytes_copied_of_a_long_tensor() -> None:
    """All but one's own slice in, all of it out; cut into slots first, then into slices."""
    with listen() as events:
        Comm().all_reduce(torch.ones(SLOT // 4 + 16 * 4, dtype=torch.float32))
    assert events[0].wire_bytes == 2 * (SLOT + 256) - (SLOT // 4 + 64)


# --- order -------------------------------------------------------------------------------------


@on_each_rank("world2")
def test_a_blocking_collective_queues_behind_those_under_way() -> None:
    comm = Comm()
    if comm.rank:
        time.sleep(0.05)  # so that the first is certainly under way on the other
    with listen() as events:
        handles = [comm.all_reduce(torch.ones(500_000), async_op=True) for _ in range(3)]
        comm.broadcast(x := torch.full((5,), float(comm.rank)), src=1)
        assert x.tolist() == [1.0] * 5
        handles.append(comm.reduce_scatter(torch.ones(3), [torch.ones(3)] * 2, async_op=True))
        comm.barrier()
        wait_for(handles)
    assert [event.lane for event in events] == ["lane"] * 3 + ["caller", "lane", "caller"]
    times = [(event.began_s, event.ended_s) for event in events]
    assert times == sorted(times)
    assert all(ended <= began for (_, ended), (began, _) in pairwise(times))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_operations_of_several_groups_under_way_at_once(transport: str) -> None:
    """As a training step on a mesh has them: both axes, all ranks, and messages to a neighbour."""

    def step() -> None:
        mesh = Mesh(dp=2, tp=2)
        comm, dp, tp = Comm(), mesh.dp, mesh.tp
        for k in range(5):
            sums = [torch.full((100_001,), float(comm.rank + k)) for _ in range(3)]
            there, back = torch.full((70_000,), float(comm.rank)), torch.empty(70_000)
            handles = [
                tp.irecv(back, 1 - tp.rank, tag=k),
                *(group.all_reduce(x, async_op=True) for group, x in zip((comm, dp, tp), sums)),
                tp.isend(there, 1 - tp.rank, tag=k),
            ]
            small = torch.tensor([float(comm.rank)])
            tp.all_reduce(small)  # blocking, while all those are under way
            wait_for(reversed(handles))
            assert small.item() == sum(tp.ranks)
            assert (back == tp.ranks[1 - tp.rank]).all()
            for group, x in zip((comm, dp, tp), sums):
                assert (x == sum(group.ranks) + k * group.size).all(), (group, k)

    with World(4, transport=transport) as world:
        world.run(step)


@on_each_rank("world2")
def test_a_send_is_over_when_it_is_taken_and_not_before() -> None:
    comm = Comm()
    for tag, numel in ((0, 1), (1, 100), (2, 1_000_000)):
        if comm.rank == 0:
            handle = comm.isend(torch.ones(numel), 1, tag)
            comm.barrier()
            time.sleep(0.01)
            assert not handle.is_completed()
            comm.barrier()
            handle.wait()
            assert handle.is_completed()
        else:
            comm.barrier()
            comm.barrier()
            comm.recv(torch.ones(numel), 0, tag)


@pytest.mark.parametrize("numel", [1, 1_000_000])
def test_two_ranks_that_both_send_first_are_reported(world2: World, numel: int) -> None:
    def both_send() -> None:
        comm = Comm()
        comm.send(torch.ones(numel), 1 - comm.rank)
        comm.recv(torch.ones(numel), 1 - comm.rank)

    raises("ranks 0 and 1 wait for each other", world2.run, both_send, error=RankError)


@on_each_rank("world2")
def test_a_receive_makes_progress_while_its_rank_waits_for_something_else() -> None:
    """The sender comes to the barrier only when its long message is taken."""
    comm = Comm()
    x = torch.full((2_000_000,), float(comm.rank))
    if comm.rank == 0:
        comm.send(x, 1)
        comm.barrier()
    else:
        handle = comm.irecv(x, 0)
        comm.barrier()
        handle.wait()
    assert not x.any()


class Left:
    """A lock; `then` runs when it is first left, as another thread could."""

    def __init__(self, then: Callable[[], object]):
        self._lock, self._then = threading.Lock(), [then]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        while self._then:
            self._then.pop()()


def test_a_message_that_another_thread_takes_out_is_not_waited_for(tmp_path: Path) -> None:
    """It comes, and is taken out, between a look for it and the wait for it."""
    outbox, inbox = Outbox(tmp_path / "ring", 1), Inbox(tmp_path / "ring", 1)
    x = torch.zeros(4)
    received = inbox.receive(x, 0, asynchronous=False)

    def meanwhile() -> None:
        outbox.send(torch.ones(4), 0)
        assert received.is_completed()

    inbox._lock = Left(meanwhile)  # type: ignore[assignment]
    received.wait()
    assert x.tolist() == [1] * 4


# --- waiting -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_waiting_rank_does_not_spin(world2: World) -> None:
    """Processor time, not the time of a clock: 1 s of waiting, in three ways."""

    def waiting_s() -> float:
        comm, x = Comm(), torch.ones(2_000_000)
        used_s = time.process_time()
        for wait in (
            comm.barrier,
            lambda: comm.all_reduce(x, async_op=True).wait(),  # type: ignore[union-attr]
            lambda: comm.recv(x, 0) if comm.rank else comm.send(x, 1),
        ):
            if comm.rank == 0:
                time.sleep(1)
            wait()
        return time.process_time() - used_s

    assert world2.run(waiting_s)[1] < 1


@on_ranks_of_its_own(3, transport="shm")
def test_without_futexes_waiting_ranks_poll() -> None:
    region._system_call = None
    comm_contract.all_gather(Comm())
    comm_contract.point_to_point(Comm())
    comm_contract.in_flight(Comm())


@pytest.mark.slow
@on_ranks_of_its_own(2, transport="shm", timeout_s=0.5, check=False)
def test_a_rank_that_is_late_is_a_comm_error() -> None:
    calls: list[Callable[[Comm, torch.Tensor], Any]] = [
        lambda comm, x: comm.barrier(),
        lambda comm, x: comm.all_reduce(x, async_op=True).wait(),  # type: ignore[union-attr]
        lambda comm, x: comm.recv(x, 1),
        lambda comm, x: comm.irecv(x, 1).wait(),
        lambda comm, x: comm.send(x, 1),
        lambda comm, x: comm.send(torch.ones(3_000_000), 1),
    ]

    def wait(group: Comm, call: Callable[[Comm, torch.Tensor], Any]) -> None:
        late = ("failed: Timed out waiting 1.5 s for",)
        raises(late, call, group, torch.ones(3), error=CommError)

    groups = [Comm().subgroup([0, 1]) for _ in calls]  # an error breaks a group
    if Comm().rank == 0:
        with ThreadPoolExecutor(len(calls)) as pool:
            list(pool.map(wait, groups, calls))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_rank_that_comes_too_late_gets_an_error(transport: str, tmp_path: Path) -> None:
    """So does one that goes on after its error. (As over gloo.)"""
    calls = ("short", "long", "async", "recv", "send")

    def use(comm: Comm, call: str, x: torch.Tensor) -> None:
        if call in ("recv", "send"):
            receives = (call == "recv") == (comm.rank == 0)
            (comm.recv if receives else comm.send)(x, 1 - comm.rank)
        elif handle := comm.all_reduce(x, async_op=call == "async"):
            handle.wait()

    def go_on(comm: Comm, call: str) -> list[str]:
        errors = []
        while comm.rank == 1 and not (tmp_path / call).exists():
            time.sleep(0.01)
        for k in range(3):
            x = torch.full((1 << 8 if call == "short" else 1 << 18,), 10.0**k)
            try:
                use(comm, call, x)
                errors.append(str(x[0]))
            except CommError as error:
                errors.append(str(error))
            except RuntimeError as error:  # gloo's own, of a message it does not begin
                errors.append(f"failed: {error}")
                assert transport == "gloo"
            (tmp_path / call).touch()
        return errors

    def in_a_group_each() -> list[list[str]]:
        groups = [(Comm().subgroup([0, 1]), call) for call in calls]
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda given: go_on(*given), groups))  # type: ignore[arg-type]

    with World(2, transport=transport, timeout_s=0.5, check=False) as world:
        ranks = world.run(in_a_group_each)
    for early, late in zip(*ranks, strict=True):
        assert all("failed: " in error for error in (*early, *late)), (early, late)
        if transport == "shm":
            assert "Timed out" in early[0] and "gave up" in late[0]
            for error in (*early[1:], *late[1:]):
                assert "cannot be used after an earlier error" in error and "restart()" in error


def test_a_message_of_another_length_is_an_error_where_nothing_is_compared() -> None:
    def mismatch() -> None:
        comm = Comm()
        comm.recv(torch.ones(3), 0) if comm.rank else comm.send(torch.ones(2), 1)

    words = "a message of 8 bytes arrived for a tensor of 12"
    with World(2, transport="shm", check=False) as world:
        raises(words, world.run, mismatch, error=RankError)


# --- what is left ------------------------------------------------------------------------------


def use_everything() -> list[str]:
    """Collectives, messages, a subgroup; returns the names of files that ranks share then."""
    comm = Comm()
    for group in (comm, comm.subgroup([0, 1])):
        if group is not None:
            group.all_reduce(torch.ones(1000))
            comm_contract.point_to_point(group)
    comm.barrier()
    assert here.shared is not None
    names = set(os.listdir(here.shared))
    comm.barrier()
    return sorted(names)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="a file in memory is Linux's")
def test_what_all_have_mapped_has_no_name_any_more() -> None:
    before = in_shared_memory()
    with World(3, transport="shm") as world:
        assert len(in_shared_memory() - before) == 1
        assert world.run(use_everything) == [[]] * 3
        world.restart()
        assert world.run(use_everything) == [[]] * 3
        assert len(in_shared_memory() - before) == 1
    assert in_shared_memory() <= before


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ends", ["killed", "failing"])
def test_a_rank_that_ends_stops_the_others_at_once(ends: str, asynchronous: bool) -> None:
    def until_the_end() -> None:
        comm = Comm()
        for k in range(10_000):
            if comm.rank == 1 and k == 20:
                if ends == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError("on purpose")
            if handle := comm.all_reduce(torch.ones(300_000), async_op=asynchronous):
                handle.wait()

    says = "was killed by SIGKILL" if ends == "killed" else "raised ArithmeticError: on purpose"
    before = in_shared_memory()
    with World(3, transport="shm", timeout_s=100) as world:
        pids = world.run(os.getpid)
        raises(f"rank 1 {says}", world.run, until_the_end, error=RankError)
        assert gone(pids) and in_shared_memory() <= before
        world.run(use_everything)
    assert in_shared_memory() <= before


@pytest.mark.parametrize("way", ["blocking", "async", "recv"])
def test_an_interrupt_in_the_middle_leaves_nothing(way: str) -> None:
    """Rank 1 never comes; the others wait in the three ways that there are."""

    def wait() -> None:
        comm = Comm()
        if comm.rank == 1:
            time.sleep(600)
        if way == "recv":
            comm.recv(torch.ones(3), 1)
        wait_for([comm.all_reduce(torch.ones(300_000), async_op=way == "async")])

    before = in_shared_memory()
    with World(3, transport="shm", timeout_s=100) as world:
        pids = world.run(os.getpid)
        assert isinstance(interrupted(lambda: world.run(wait), 0.5), RankInterrupt)
        assert gone(pids) and in_shared_memory() <= before
        world.run(use_everything)
    assert in_shared_memory() <= before


@pytest.mark.parametrize("way", ["blocking", "async", "recv", "send"])
def test_the_report_says_which_rank_waits_for_which(world3: World, way: str) -> None:
    def wait() -> None:
        comm, x = Comm(), torch.ones(300_000)
        if comm.rank == 1:
            return
        if way in ("recv", "send"):
            (comm.recv if way == "recv" else comm.send)(x, 1)
        elif handle := comm.all_reduce(x, async_op=way == "async"):
            handle.wait()

    call = {"recv": r"recv\(from 1\)", "send": r"send\(to 1\)"}.get(way, r"all_reduce\(sum\)")
    said = str(raises("", world3.run, wait, error=RankError))
    assert re.search(call, said) and "float32 [300000]" in said and "test_shm.py:" in said
    assert re.search(r"rank(s 0 and 2| 0| 2) ", said) and "rank 1" in said, said


def test_without_a_folder_in_memory_the_worlds_own_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MEMORY", Path("/nowhere"))
    with World(2, transport="shm") as world:
        shared = world.run(lambda: str(labkit.comm.here.shared))[0]
        assert not shared.startswith(str(MEMORY)) and Path(shared, "board").exists()
        assert world.run(transports) == [{"shm"}] * 2
    assert not Path(shared).exists()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no room")
def test_a_full_disk_is_an_error_and_no_crash() -> None:
    def full() -> None:
        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        os.posix_fallocate = refuse  # type: ignore[assignment]
        Comm().barrier()

    with World(2, transport="shm") as world:
        raises("no room for .* MB.*transport=.gloo", world.run, full, error=RankError)
