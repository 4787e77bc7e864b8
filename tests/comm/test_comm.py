"""The communicator on real ranks: results, bytes, events, errors. See comm_contract.py, too."""

import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

import comm_contract
import labkit.comm
from comm_contract import CONTRACT, SWEPT, check, check_bytes, events_of, everyones, given, reduced
from command import python
from labkit import Comm, CommEvent, Link, RankError, World, attach, listen
from labkit.comm import CommError
from labkit.parallel.common.ownership import broadcast_tensors
from labkit.runtime.transports.wire import Wire
from tables import cases, raises
from worlds import on_each_rank, world_fixture

FILE = Path(__file__).name
KINDS = [(n, transport) for transport in ("shm", "gloo") for n in (1, 2, 3, 4)]
SLOW = [(2, "gloo"), (4, "gloo")]  # tests/comm/test_algorithms.py has what they send, at all sizes


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS],
    ids=lambda kind: f"{kind[1]}-{kind[0]}",
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    size, transport = request.param
    with World(size, transport=transport) as world:
        yield world


def strictly(function: Callable[..., Any], *args: Any) -> Any:
    """Run it with every warning an error: pytest's own filters do not reach the ranks."""
    with warnings.catch_warnings(action="error"):
        return function(Comm(), *args)


def test_every_operation_equals_plain_computation(world: World) -> None:
    for part in CONTRACT:
        if (world.size, world.transport) not in SLOW or part not in SWEPT:  # else the next test
            world.run(strictly, part)


@pytest.mark.slow
def test_every_operation_reduction_dtype_and_size_with_each_other(world: World) -> None:
    world.run(strictly, comm_contract.check_thoroughly)


FAST = Link(gbps=1000, latency_us=1)


@cases(
    (2, {"check": False}),
    (2, {"link": FAST}),
    pytest.param(3, {"link": FAST}, marks=pytest.mark.slow),
    ids=["without comparing ranks", "modelled wire, 2 ranks", "modelled wire, 3 ranks"],
)
def test_the_same_with_options(size: int, options: dict[str, Any]) -> None:
    with World(size, **options) as world:
        world.run(strictly, check)


@pytest.mark.parametrize("transport", ("shm", "gloo"))
def test_the_same_in_subgroups_at_once(worlds: Callable[..., World], transport: str) -> None:
    def in_halves() -> tuple[int, int, tuple[int, ...]]:
        comm = Comm()
        halves = [comm.subgroup([2, 0]), comm.subgroup([1, 3])]
        half = halves[comm.rank % 2]
        assert half is not None and halves[1 - comm.rank % 2] is None
        comm_contract.reduce_scatter(half)
        comm_contract.gather_and_scatter(half)  # the roots are ranks of the subgroup
        comm_contract.point_to_point(half)
        comm_contract.in_flight(half)
        return half.rank, half.size, half.ranks

    members = [(0, 2, (0, 2)), (0, 2, (1, 3)), (1, 2, (0, 2)), (1, 2, (1, 3))]
    assert worlds(4, transport=transport).run(in_halves) == members


@on_each_rank("world2")
def test_a_subgroup_of_one_and_of_all() -> None:
    comm = Comm()
    alone = [comm.subgroup([rank]) for rank in range(comm.size)][comm.rank]
    everyone = comm.subgroup(range(comm.size))
    assert alone is not None and everyone is not None
    check(alone)
    assert everyone.subgroup([0]) is None or comm.rank == 0, "it has all ranks, so it may"
    comm_contract.in_flight(everyone)


@on_each_rank("world2")
def test_what_was_given_is_not_written_and_no_gradient_appears() -> None:
    comm = Comm()
    weight = torch.nn.Parameter(torch.ones(3, 3))
    loss = (weight * (comm.rank + 1)).sum()
    loss.backward()
    assert weight.grad is not None
    comm.all_reduce(weight.grad, "mean")
    assert weight.grad.tolist() == [[1.5] * 3] * 3
    comm.all_reduce(weight)  # a leaf that requires grad, in place
    assert weight.tolist() == [[2.0] * 3] * 3 and weight.requires_grad and weight.is_leaf
    out = torch.zeros(2, 3, 3)
    comm.all_gather_into_tensor(out, weight)
    assert not out.requires_grad


@pytest.mark.parametrize("numel", (0, 1, 2, 7, 1000, 1001))
def test_bytes_of_every_operation_follow_the_formulas(world: World, numel: int) -> None:
    check_bytes(world.run(lambda: events_of(Comm(), numel)), numel)


@pytest.mark.parametrize("transport", ("shm", "gloo"))
def test_bytes_in_a_subgroup_count_its_ranks(worlds: Callable[..., World], transport: str) -> None:
    def events() -> Any:
        subgroup = Comm().subgroup([0, 2, 3])
        return subgroup and events_of(subgroup, 1001)

    first, outside, *rest = worlds(4, transport=transport).run(events)
    assert outside is None
    check_bytes([first, *rest], 1001)
    assert {event.ranks for of_rank in (first, *rest) for event in of_rank.values()} == {(0, 2, 3)}


@cases(({"link": FAST},), ({"backend": "gloo", "check": False},), ids=str)
def test_bytes_over_a_modelled_wire_and_without_check_are_the_same(options: dict[str, Any]) -> None:
    with World(3, **options) as world:
        check_bytes(world.run(lambda: events_of(Comm(), 1001)), 1001)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not count its loopback")
def test_the_kernel_counts_the_bytes_that_the_formulas_say() -> None:
    """Independent of our own counting. gloo's reduce-scatter would move 1.5 S for each rank."""
    with World(4, backend="gloo") as world:
        for collective in ("reduce_scatter", "all_gather", "all_reduce"):
            comm_contract.check_kernel_bytes(world, collective)


def many_events(comm: Comm) -> list[CommEvent]:
    with listen() as events:
        events_of(comm, 1001)
        for part in ("all_to_all", "objects_and_barrier", "point_to_point", "in_flight"):
            getattr(comm_contract, part)(comm)
    return events


@pytest.fixture(scope="module")
def recorded() -> list[list[CommEvent]]:
    with World(3) as world:
        return world.run(lambda: many_events(Comm()))


def test_times_of_an_event_are_in_order(recorded: list[list[CommEvent]]) -> None:
    for events in recorded:
        issued = [event.issued_s for event in events]
        assert issued == sorted(issued)
        for event in events:
            if not event.wait_ended_s:
                assert event.op == "send" and not event.blocking, "only what nobody waited for"
                continue
            assert event.issued_s <= event.began_s <= event.ended_s <= event.wait_ended_s
            assert event.issued_s <= event.wait_began_s <= event.wait_ended_s
            if event.blocking:
                assert event.wait_began_s == event.issued_s, "the strategy stood still at once"


def test_numbers_are_equal_on_all_ranks(recorded: list[list[CommEvent]]) -> None:
    collectives = [
        [(e.seq, e.op, e.dtype) for e in events if e.op not in ("send", "recv")]
        for events in recorded
    ]
    first = collectives[0]
    assert collectives == [first] * len(collectives)
    assert [seq for seq, *_ in first] == [first[0][0] + k for k in range(len(first))]


def test_every_message_sent_is_the_one_received(recorded: list[list[CommEvent]]) -> None:
    messages = [event for events in recorded for event in events]
    sent = {(e.rank, e.peer, e.tag, e.seq, e.dtype) for e in messages if e.op == "send"}
    received = {(e.peer, e.rank, e.tag, e.seq, e.dtype) for e in messages if e.op == "recv"}
    assert sent == received != set()


@on_each_rank("world")
def test_events_say_what_was_called() -> None:
    comm = Comm()
    last = comm.size - 1
    with listen() as events:
        comm.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16), "max")
        comm.broadcast(torch.ones(()).long(), src=last, async_op=True).wait()
    first, second = events
    assert (first.op, first.dtype, first.shape) == ("all_reduce", "bfloat16", (2, 3))
    assert (first.rank, first.ranks) == (comm.rank, tuple(range(comm.size)))
    assert (first.group, first.blocking, first.peer) == ("default", True, None)
    assert (second.op, second.dtype, second.shape) == ("broadcast", "int64", ())
    assert (second.blocking, second.peer, second.seq) == (False, last, first.seq + 1)


@on_each_rank("world2")
def test_the_source_is_the_line_of_the_caller() -> None:
    comm, frame = Comm(), inspect.currentframe()
    with listen() as events:
        line = frame.f_lineno
        comm.all_reduce(torch.ones(3))
        comm.reduce_scatter_tensor(torch.ones(1), torch.ones(2))
        comm.all_gather_object("x")
        (comm.send if comm.rank else comm.recv)(torch.ones(1), 1 - comm.rank)
        broadcast_tensors([torch.ones(3)], comm)
    *sources, of_strategy = [event.source for event in events]
    lines = [f"{FILE}:{line + k} in {frame.f_code.co_name}" for k in (1, 2, 3, 3, 4, 5)]
    assert sources == lines[:-1]
    assert of_strategy.startswith("ownership.py:")
    assert of_strategy.endswith(f"broadcast_tensors, from {lines[-1]}")


def test_an_operation_that_cannot_even_begin_is_a_comm_error() -> None:
    gone = RuntimeError("Connection closed by peer\nand much more")

    def on_a_broken_pair(noted: bool) -> str:
        comm = Comm()
        with patch.object(Wire, "isend", side_effect=gone), listen() if noted else nullcontext():
            return str(raises("", comm.send, torch.ones(3), 1 - comm.rank, error=CommError))

    for checked in (False, True):
        with World(2, backend="gloo", check=checked) as world:
            for said in (*world.run(on_a_broken_pair, False), *world.run(on_a_broken_pair, True)):
                assert said.startswith("send") and said.endswith(": Connection closed by peer")


@on_each_rank("world2")
def test_listening_nests_and_ends() -> None:
    comm = Comm()
    x = torch.ones(3)
    with listen() as outer:
        comm.all_reduce(x)
        with listen() as inner:
            comm.all_reduce(x)
            with pytest.raises(ZeroDivisionError), listen() as broken:
                comm.all_reduce(x)
                _ = 1 / 0
            handle = comm.all_reduce(x, async_op=True)
        comm.all_reduce(x)
    comm.all_reduce(x)
    handle.wait()  # nobody listens any more, but the event has its end
    assert outer[1] is inner[0] and broken == [inner[1]] and inner[2].wait_ended_s > 0
    assert [len(outer), len(inner), len(broken)] == [5, 3, 1] and not labkit.comm.here.listeners


def test_comparing_ranks_does_not_count_as_communication(recorded: list[list[CommEvent]]) -> None:
    def counts(events: list[CommEvent]) -> list[tuple[Any, ...]]:
        return [(e.op, e.payload_bytes, e.bus_bytes, e.wire_bytes) for e in events]

    with World(len(recorded), check=False) as unchecked:
        for with_check, without in zip(recorded, unchecked.run(lambda: many_events(Comm()))):
            assert counts(with_check) == counts(without)


@on_each_rank("world2")
def test_torchs_own_operations_are_not_events_and_disturb_none() -> None:
    comm = Comm()
    peer = 1 - comm.rank
    with listen() as events:
        for k in range(5):
            ours, theirs = given(comm.rank, 100, salt=k), given(comm.rank, 100, salt=100 + k)
            handle = comm.all_reduce(ours, async_op=True)
            work = dist.all_reduce(theirs, async_op=True)
            arriving = [torch.zeros(100), torch.zeros(100)]
            receives = [dist.irecv(arriving[0], peer), comm.irecv(arriving[1], peer)]
            plain = dist.isend(given(comm.rank, 100, salt=200 + k), peer)  # tag 0, as ours
            comm.send(given(comm.rank, 100, salt=300 + k), peer)
            comm_contract.wait_for([work, plain, *receives, handle])
            assert torch.equal(ours, reduced(everyones(comm, 100, salt=k), "sum"))
            assert torch.equal(theirs, reduced(everyones(comm, 100, salt=100 + k), "sum"))
            for received, salt in zip(arriving, (200 + k, 300 + k)):
                assert torch.equal(received, given(peer, 100, salt=salt))
            dist.barrier()
    assert len(events) == 15


@on_each_rank("world2")
def test_all_comms_of_a_group_share_its_numbers() -> None:
    x, first = torch.ones(3), Comm()
    comms = [first] * 5
    if first.rank == 0:
        second = Comm(dist.group.WORLD)
        comms = [first, second, first, Comm(), second]
    for comm in comms:
        comm.all_reduce(x)
    assert x.tolist() == [32.0] * 3


def in_threads(
    target: Callable[[Any], Any], values: Iterable[Any], meanwhile: Callable[[], Any] = lambda: None
) -> None:
    """`target(value)` in a thread for each value, beside `meanwhile`; raises the first error."""
    with ThreadPoolExecutor(len(values := list(values))) as pool:
        running = [pool.submit(target, value) for value in values]
        meanwhile()
    for future in running:
        future.result()


@on_each_rank("world2")
def test_two_threads_in_two_groups_at_once() -> None:
    comm = Comm()

    def use(group: Comm) -> None:
        for part in (comm_contract.in_flight, comm_contract.point_to_point) * 2:
            part(group)

    groups = [comm.subgroup([0, 1]) for _ in range(2)]
    in_threads(use, groups, lambda: comm_contract.in_flight(comm))


@on_each_rank("world2")
def test_threads_share_a_comm_for_messages_of_different_tags() -> None:
    comm = Comm()
    peer = 1 - comm.rank

    def exchange(tag: int) -> None:
        for k in range(30):
            arriving = torch.zeros(100)
            receive = comm.irecv(arriving, peer, tag)
            comm.send(given(comm.rank, 100, salt=100 * tag + k), peer, tag)
            receive.wait()
            assert torch.equal(arriving, given(peer, 100, salt=100 * tag + k)), (tag, k)

    with listen() as events:
        in_threads(exchange, range(4))
    assert len(events) == 240
    for op in ("send", "recv"):
        numbers = {(event.tag, event.seq) for event in events if event.op == op}
        assert len(numbers) == 120


@on_each_rank("world2")
def test_hundreds_of_operations_in_flight() -> None:
    comm = Comm()
    xs = [given(comm.rank, 11, salt=k) for k in range(200)]
    comm_contract.wait_for(reversed([comm.all_reduce(x, async_op=True) for x in xs]))
    for k, x in enumerate(xs):
        assert torch.equal(x, reduced(everyones(comm, 11, salt=k), "sum"))


def test_groups_come_and_go_and_leave_nothing_behind(tmp_path: Path) -> None:
    """A process group that is destroyed takes its threads and sockets with it, and the next one
    under the same name is not mistaken for it."""

    def sockets_and_threads() -> tuple[int, int]:
        process = psutil.Process()
        return len(process.net_connections("tcp")), process.num_threads()

    def again() -> tuple[tuple[int, int], tuple[int, int], str]:
        me = attach()
        dist.destroy_process_group()
        before = sockets_and_threads()
        for k in range(4):
            store = dist.FileStore(str(tmp_path / f"store{k}"), me.size)
            dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size)
            comm = Comm()
            # Number 1 of this world is an all-reduce here and a broadcast there.
            first = comm.all_reduce if k % 2 else comm.broadcast
            if me.rank == 0:
                time.sleep(0.05)  # the board still has the first operation of the world before
            first(x := torch.ones(k + 1))
            assert x.sum() == (k + 1) * (2 if k % 2 else 1)
            half = comm.subgroup([0, 1])
            half.all_reduce(torch.ones(k + 1), async_op=True).wait()
            name = repr(comm)
            del comm, half, first
            dist.destroy_process_group()
        while sockets_and_threads() != before:  # threads end a moment later
            time.sleep(0.01)
        return before, sockets_and_threads(), name

    with World(2) as world:
        for before, after, name in world.run(again):
            assert after == before and name.endswith("group default of world 5)")


@on_each_rank("world2")
def test_a_handle_keeps_what_it_needs() -> None:
    kept = torch.zeros(1000, 2)
    handle = Comm().all_reduce(kept[:, 0], async_op=True)
    handles = [Comm().all_reduce(torch.ones(50_000), async_op=True) for _ in range(10)]
    torch.ones(1_000_000)
    comm_contract.wait_for([handle, *handles])
    assert float(kept.sum()) == 0.0


@pytest.mark.slow
def test_a_subgroup_gives_up_when_the_world_does() -> None:
    """torch's new groups would wait half an hour."""

    def alone() -> None:
        both = Comm().subgroup([0, 1])
        both.all_reduce(torch.ones(3)) if both.rank == 0 else time.sleep(1000)

    with World(2, timeout_s=1, check=False) as world:
        raises("(?s)rank 0.*all_reduce", world.run, alone, error=RankError)


@on_each_rank("world2")
def test_errors_say_what_was_wrong_and_what_to_do() -> None:
    c, ones = Comm(), torch.ones
    rank, peer = c.rank, 1 - c.rank
    calls: dict[str, Callable[[], Any]] = {
        "op='avg' is not a reduction; choose one of sum, mean, min, max, product":
            lambda: c.all_reduce(ones(3), "avg"),
        "op=<RedOpType.SUM: 0> is not a reduction":
            lambda: c.all_reduce(ones(3), dist.ReduceOp.SUM),
        "the mean of torch.int64 may not be exact; sum and divide":
            lambda: c.reduce(ones(3).long(), op="mean"),
        "torch.complex64 has no order, so max is undefined":
            lambda: c.all_reduce(ones(3) * 1j, "max"),
        "rank 2 is not in this group of 2; choose 0 to 1": lambda: c.broadcast(ones(3), src=2),
        "rank -1 is not in this group of 2": lambda: c.reduce(ones(3), dst=-1),
        "cannot send to or receive from itself; copy the tensor": lambda: c.send(ones(3), rank),
        "tag 1048576 is out of range; choose 0 to 1048575":
            lambda: c.irecv(ones(3), peer, tag=1 << 20),
        "all_gather: outs has length 3; pass 2 tensors, one per rank":
            lambda: c.all_gather([ones(3)] * 3, ones(3)),
        "all_gather: this rank's tensor has 4 elements, but outs[":
            lambda: c.all_gather([ones(3)] * 2, ones(4)),
        "reduce_scatter: the tensors have different dtypes; convert them to one dtype":
            lambda: c.reduce_scatter(ones(3), [ones(3), ones(3).double()]),
        "all_to_all: ins has length 1; pass 2 tensors, one per rank":
            lambda: c.all_to_all([ones(3)] * 2, [ones(3)]),
        "reduce_scatter_tensor: a tensor of shape [7] cannot be split into 2 equal parts; pad it":
            lambda: c.reduce_scatter_tensor(ones(3), ones(7)),
        "all_gather_into_tensor: a tensor of shape [3, 2] is not contiguous; pass a contiguous":
            lambda: c.all_gather_into_tensor(ones(2, 3).t(), ones(3)),
        "an expanded tensor (shape [4], strides [0]) shares memory between elements":
            lambda: c.all_reduce(ones(1).expand(4)),
        "shares memory between elements and cannot be written; pass x.contiguous()":
            lambda: c.irecv(ones(3, 1).expand(3, 2), peer),
        "a tensor of layout torch.sparse_coo cannot be sent; pass x.to_dense()":
            lambda: c.all_reduce(torch.eye(3).to_sparse()),
        "torch has no max of torch.uint16; convert it first, for":
            lambda: c.all_reduce(ones(3).to(torch.uint16), "max"),
        "only tensors can be sent, not float; wrap it: torch.tensor([value])":
            lambda: c.send(5.0, peer),
        "only tensors can be sent, not int; wrap it": lambda: c.all_reduce(5, "max"),
        "only tensors can be sent, not ndarray; wrap it: torch.as_tensor(value)":
            lambda: c.broadcast(ones(3).numpy()),
        "only tensors can be sent, not bool": lambda: c.all_gather([True] * 2, ones(1)),
        "only tensors can be sent, not str": lambda: c.all_gather([ones(1)] * 2, "x"),
        "cannot move meta tensors": lambda: c.all_reduce(ones(3, device="meta")),
        "subgroup([0, 0]): choose at least one rank, each once": lambda: c.subgroup([0, 0]),
        "subgroup([]): choose at least one rank, each once": lambda: c.subgroup([]),
        "rank 7 is not in this group": lambda: c.subgroup([0, 7]),
        "scatter: ins has length 1; pass": lambda: c.scatter(ones(3), [ones(3)], rank),
        f"gather: rank {rank} must pass outs, one tensor for each rank":
            lambda: c.gather(ones(3), dst=rank),
        f"gather: only rank {peer} passes outs; pass None on the others":
            lambda: c.gather(ones(3), [ones(3)] * 2, peer),
        f"scatter: only rank {peer} passes ins; pass None on the others":
            lambda: c.scatter(ones(3), [ones(3)] * 2, peer),
    }  # fmt: skip
    with listen() as events:
        for words, call in calls.items():
            raises((words,), call, error=(ValueError, TypeError))
    assert not events
    c.barrier()  # the communicator works as before


def test_a_communicator_needs_ranks_and_membership(world2: World) -> None:
    raises("not a rank yet. Run the function with World", Comm, error=RuntimeError)

    def outside() -> bool:
        comm = Comm()
        group = dist.new_group([0])
        if comm.rank == 1:
            raises("this rank is not a member of the group", Comm, group)
        return comm.subgroup([1]) is None

    assert world2.run(outside) == [True, False]


@on_each_rank("world4")
def test_a_subgroup_has_no_subgroups() -> None:
    """torch would need the ranks outside, and hang."""
    comm = Comm()
    half = comm.subgroup([0, 1])
    assert (half is not None) == (comm.rank < 2)
    if half is not None:
        raises("has 2 of 4 ranks; call it on the Comm of all ranks", half.subgroup, [0])


def sized(comm: Comm, times: int = 1) -> torch.Tensor:
    return torch.ones(times * (2 + comm.rank))


# What an all-reduce or a broadcast may differ in is in tests/runtime/test_failures.py.
DISAGREE: dict[str, Callable[[Comm], Any]] = {
    "a part of a list": lambda c: c.all_gather([torch.ones(2), sized(c)], sized(c)),
    "gathered size": lambda c: c.all_gather_into_tensor(sized(c, times=2), sized(c)),
    "scattered size": lambda c: c.reduce_scatter_tensor(sized(c), sized(c, times=2)),
    "message": lambda c: c.recv(torch.ones(3), 0) if c.rank else c.send(torch.ones(2), 1),
    "members": lambda c: c.subgroup([c.rank]),
    "subgroup against barrier": lambda c: c.subgroup([0, 1]) if c.rank else c.barrier(),
}


@pytest.mark.parametrize("what", DISAGREE)
def test_ranks_that_disagree_are_named(world2: World, what: str) -> None:
    words, call = f"(?s)disagree about.*rank 0: .* at {FILE}.*rank 1: .* at {FILE}", DISAGREE[what]
    assert raises(words, world2.run, lambda: call(Comm()), error=RankError).kind == "disagree"


def test_a_rank_missing_from_a_subgroup_call_is_named(world2: World) -> None:
    words = "rank 0 waits for rank 1, which returned without calling the operation"
    raises(words, world2.run, lambda: Comm().rank or Comm().subgroup([0, 1]), error=RankError)


# Lower bounds only: a wire of 0.1 Gb/s carries no megabyte in less than 80 ms, on any machine.

MEGABYTE_S = 0.080
slow_wire = world_fixture(2, link=Link(gbps=0.1))


def send_on(comm: Comm, x: torch.Tensor, source: int = 0) -> None:
    comm.send(x, 1 - source) if comm.rank == source else comm.recv(x, source)


def timed(use: Callable[[Comm], Any]) -> tuple[float, float]:
    """On a rank, after a barrier: when `use` began and ended."""
    comm = Comm()
    comm.barrier()
    began_s = time.monotonic()
    use(comm)
    return began_s, time.monotonic()


X = torch.zeros(1_000_000, dtype=torch.uint8)


def test_a_message_or_a_collective_is_no_faster_than_the_wire(slow_wire: World) -> None:
    (sent_s, _), (_, arrived_s) = slow_wire.run(timed, lambda comm: send_on(comm, X))
    assert arrived_s - sent_s >= MEGABYTE_S
    for began_s, ended_s in slow_wire.run(timed, lambda comm: comm.all_reduce(X)):
        assert ended_s - began_s >= MEGABYTE_S  # each of two ranks sends 2 x 1/2 of it


def test_all_messages_of_a_rank_share_its_wire(slow_wire: World) -> None:
    """Whatever their group, tag or operation: four quarters take as long as the whole."""

    def four() -> tuple[float, float]:
        other = Comm().subgroup([0, 1])
        first, second, third, fourth = X.clone().split(250_000)

        def use(comm: Comm) -> None:
            peer = 1 - comm.rank
            move, move_other = (getattr(x, ("isend", "irecv")[comm.rank]) for x in (comm, other))
            handles = [move(first, peer), move(second, peer, tag=1), move_other(third, peer)]
            comm_contract.wait_for([*handles, other.broadcast(fourth, async_op=True)])

        return timed(use)

    (sent_s, _), (_, arrived_s) = slow_wire.run(four)
    assert arrived_s - sent_s >= MEGABYTE_S


def test_latency_is_paid_by_every_message() -> None:
    def rounds(comm: Comm) -> None:
        for sender in (0, 1) * 3:  # there and back again
            send_on(comm, torch.zeros(1), sender)

    with World(2, link=Link(gbps=1000, latency_us=10_000)) as world:
        assert max(ended_s - began_s for began_s, ended_s in world.run(timed, rounds)) >= 6 * 0.010


@on_each_rank("slow_wire")
def test_an_asynchronous_operation_returns_before_the_wire_delivers() -> None:
    comm = Comm()
    x, y = torch.zeros(4_000_000, dtype=torch.uint8), torch.zeros(4_000_000, dtype=torch.uint8)
    comm.barrier()
    with listen() as events:
        handle = comm.all_reduce(x, async_op=True)
        busy = not handle.is_completed()  # else the call took the 320 ms
        message = comm.isend(y, 1) if comm.rank == 0 else comm.irecv(y, 0)
        message_busy = not message.is_completed()
        computed_s = time.monotonic()
        handle.wait()
        message.wait()
    assert busy and message_busy and events[0].issued_s < computed_s < events[0].ended_s


wire3 = world_fixture(3, link=Link(gbps=1))


@on_each_rank("wire3")
def test_an_unreceived_message_does_not_block_the_others() -> None:
    """The wire is in order, the receivers need not be."""
    comm = Comm()
    x, y = torch.full((200_000,), 1.0), torch.full((200_000,), 2.0)
    if comm.rank == 0:
        comm_contract.wait_for([comm.isend(x, 1, tag=1), comm.isend(y, 1, tag=2), comm.isend(y, 2)])
    elif comm.rank == 1:
        comm.recv(x, 2, tag=3)  # rank 2 sends it when it has heard from rank 0
        comm.recv(x, 0, tag=2)
        comm.recv(y, 0, tag=1)
        assert (x[0].item(), y[0].item()) == (2, 1)
    else:
        comm.recv(x, 0)
        comm.send(x, 1, tag=3)


def test_a_link_without_bandwidth_is_refused() -> None:
    assert Link(gbps=8).seconds(1_000_000_000) == 1.0
    for gbps in (0, -1, float("nan")):
        raises("choose a bandwidth above 0 gigabits", Link, gbps=gbps)
    raises("choose a latency of 0 or more", Link, gbps=1, latency_us=-1)


ON_PAPER = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from labkit import Comm, Link, listen
from labkit.comm import collectives, here
from labkit.runtime.transports import wire
from labkit.events import chunk_sizes

n, rank = 1024, 3
dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)

def forbidden(*_, **__):
    raise AssertionError("an algorithm was expanded, or something was sent")

for name in dir(collectives):
    if callable(getattr(collectives, name)) and name.islower():
        setattr(collectives, name, forbidden)
for of_collective in collectives.ALGORITHMS.values():
    of_collective.update(dict.fromkeys(of_collective, forbidden))
wire.Wire.isend = wire.Wire.irecv = forbidden

def use(comm):
    x, part = torch.empty(n * 1000, 3), torch.empty(1000, 3)
    comm.all_reduce(x, "mean"); comm.reduce(x, dst=5); comm.broadcast(x.t())
    comm.reduce_scatter_tensor(part, x); comm.all_gather_into_tensor(x, part)
    comm.gather(part); comm.scatter(part); comm.all_to_all_single(x, torch.empty_like(x))
    comm.ring_exchange(x, x); comm.barrier(); comm.send(x, 5); comm.recv(x, 1023)
    comm.all_reduce(torch.empty(1001), async_op=True).wait()

def check(events):
    S, p = n * 1000 * 3 * 4, 1000 * 3 * 4
    bus = {
        "reduce": S, "broadcast": S, "reduce_scatter": S - p, "all_gather": S - p, "gather": S - p,
        "scatter": S - p, "all_to_all": S - p, "ring_exchange": S, "barrier": 0, "send": S,
        "recv": 0,
    }
    assert [event.op for event in events] == ["all_reduce", *bus, "all_reduce"]
    assert events[0].bus_bytes == 2 * (S - p) == 2 * 1023 * S // 1024
    for event in events[1:-1]:
        assert event.payload_bytes == (0 if event.op == "barrier" else S), event.op
        assert event.bus_bytes == bus[event.op], event.op
    sizes = chunk_sizes(1001, n)
    assert events[-1].bus_bytes == 4 * (2 * 1001 - sizes[rank] - sizes[rank + 1])
    for event in events:
        assert event.ranks == tuple(range(n)) and event.rank == rank
        assert (event.wire_bytes, event.transport) == (0, "fake"), "nothing was sent"
        assert event.issued_s <= event.began_s <= event.ended_s <= event.wait_ended_s

comm = Comm()
"""

WITH_TENSORS = """
for link in (None, Link(gbps=1)):
    here.link = link
    with listen() as events:
        use(comm)
    check(events)
    with listen() as events:
        comm.all_reduce(torch.empty(100, device="meta"))
    assert events[0].payload_bytes == 400
assert comm.all_gather_object({"a": 1}) == [{"a": 1}] * n
part = comm.subgroup(range(0, n, 2))
assert part is None
part = comm.subgroup(range(3, n, 8))
with listen() as events:
    part.all_reduce(torch.empty(128))
assert events[0].bus_bytes == 2 * 127 * 4 and events[0].ranks == tuple(range(3, n, 8))
"""

WITHOUT_DATA = """
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode(), listen() as events:
    use(comm)
    comm.all_reduce(torch.empty(100_000, 100_000, dtype=torch.bfloat16))
check(events[:-1])
assert events[-1].payload_bytes == 20_000_000_000, "more than this machine holds"
"""


@pytest.mark.parametrize(
    "script", [WITH_TENSORS, pytest.param(WITHOUT_DATA, marks=pytest.mark.slow)],
    ids=["tensors", "fake tensors"],
)  # fmt: skip
def test_a_world_on_paper_records_and_moves_nothing(script: str) -> None:
    done = python("-W", "error", "-c", ON_PAPER + script + "\nprint('as it should be')")
    assert done.stdout == "as it should be\n"
