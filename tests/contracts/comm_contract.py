"""What the communicator must do, on every rank. Each rank can compute what every other was given,
so results are compared on the spot. All numbers are small integers: exact in every dtype."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import reduce as fold
from typing import Any

import psutil
import torch

from algorithm_bytes import Call, sent_bytes
from labkit import Comm, CommEvent, Handle, World, listen

SIZES = (0, 1, 3, 7, 1000)  # on 4 ranks: fewer elements than ranks, and odd chunks
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
ALL = (*FLOATS, *INTEGERS, *COMPLEX)

PLAIN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": lambda x, y: x + y,
    "mean": lambda x, y: x + y,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": lambda x, y: x * y,
}


def ops_of(dtype: torch.dtype) -> list[str]:
    """The reductions that make sense for `dtype`."""
    if dtype.is_complex:
        return ["sum", "mean", "product"]
    return [op for op in PLAIN if op != "mean" or dtype.is_floating_point]


def given(
    rank: int, *shape: int, dtype: torch.dtype = torch.float32, salt: int = 0
) -> torch.Tensor:
    """What `rank` brings: small integers, different for each rank and salt."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if dtype is torch.bool:
        return integers(0, 2).bool()
    if dtype is torch.uint8:
        return integers(0, 10).to(dtype)
    if dtype.is_complex:
        return torch.complex(integers(-4, 5).double(), integers(-4, 5).double()).to(dtype)
    return integers(-4, 5).to(dtype)


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    total = fold(PLAIN[op], tensors)
    return total / len(tensors) if op == "mean" else total


def layouts(x: torch.Tensor) -> Iterator[tuple[torch.Tensor, Callable[[], bool]]]:
    """`x` in several layouts, each with a check that the memory between is untouched."""
    yield x.clone(), lambda: True
    yield x.t().contiguous().t() if x.dim() == 2 else x.clone(), lambda: True

    wide = x.new_ones(x.numel(), 3)
    column = wide[:, 1].unflatten(0, x.shape) if x.dim() else wide[:, 1].view(())
    column.copy_(x)
    yield column, lambda: bool((wide[:, ::2] == 1).all())

    odd = x.new_ones(2 * x.numel() + 1)
    strided = odd[1::2].unflatten(0, x.shape) if x.dim() else odd[1::2].view(())
    strided.copy_(x)
    yield strided, lambda: bool((odd[::2] == 1).all())

    if x.is_floating_point() or x.is_complex():
        yield x.clone().requires_grad_(), lambda: True
        yield x.clone().requires_grad_() * 1, lambda: True  # with a history
    if x.dtype is torch.float32:
        yield torch.complex(x, -x).conj().imag, lambda: True  # negated lazily
    if x.is_complex():
        yield x.conj().clone().conj(), lambda: True  # conjugated lazily


def one_for_all(x: torch.Tensor) -> torch.Tensor:
    return x.view(1).expand(6)


def equal(x: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert x.dtype == expected.dtype and x.shape == expected.shape, (what, x, expected)
    assert torch.equal(x.detach().resolve_conj().resolve_neg(), expected), (what, x, expected)


def block(operation: Callable[..., Handle | None], *args: object) -> None:
    assert operation(*args) is None


def hold(operation: Callable[..., Handle | None], *args: object) -> None:
    handle = operation(*args, async_op=True)
    assert isinstance(handle, Handle)
    handle.wait()
    assert handle.is_completed()


WAYS = (block, hold)


def wait_for(handles: Iterable[Any]) -> None:
    for handle in handles:
        assert handle is not None
        handle.wait()


def kinds(sweep: bool, root: int = 0) -> Iterator[tuple[torch.dtype, int]]:
    """Every dtype and size. All sizes of every dtype, and all dtypes of every root, are left to a
    sweep."""
    for dtype in ALL if sweep or root == 0 else (torch.float32,):
        for numel in SIZES if sweep or dtype is torch.float32 else (7,):
            yield dtype, numel


def everyones(comm: Comm, *shape: int, **kind: Any) -> list[torch.Tensor]:
    """What all ranks bring."""
    return [given(r, *shape, **kind) for r in range(comm.size)]


# --- collectives that reduce -------------------------------------------------------------------


def all_reduce(comm: Comm, sweep: bool = False) -> None:
    for dtype, numel in kinds(sweep):
        for op in ops_of(dtype):
            for way in WAYS[: 1 + (sweep or op == "sum")]:
                x = given(comm.rank, numel, dtype=dtype)
                way(comm.all_reduce, x, op)
                equal(x, reduced(everyones(comm, numel, dtype=dtype), op), (dtype, op, numel))
    for shape in ((), (5,), (3, 5), (2, 3, 4)):
        for dtype in (torch.float32, torch.complex64) if sweep or shape else (torch.float32,):
            expected = reduced(everyones(comm, *shape, dtype=dtype), "sum")
            for way in WAYS[: 1 + (sweep or shape == (3, 5))]:
                for x, untouched in layouts(given(comm.rank, *shape, dtype=dtype)):
                    way(comm.all_reduce, x)
                    equal(x, expected, (shape, x.stride()))
                    assert untouched()


def reduce(comm: Comm, sweep: bool = False) -> None:
    for dst in range(comm.size):
        for dtype, numel in kinds(sweep, dst):
            for op in ops_of(dtype) if sweep or dst == 0 else ["sum"]:
                all_given = everyones(comm, numel, dtype=dtype)
                x = all_given[comm.rank].clone()
                WAYS[numel % 2](comm.reduce, x, dst, op)
                expected = reduced(all_given, op) if comm.rank == dst else all_given[comm.rank]
                equal(x, expected, (dst, dtype, op, numel))
        expected = reduced(everyones(comm, 3, 5), "sum")
        for x, untouched in layouts(given(comm.rank, 3, 5)):
            comm.reduce(x, dst)
            equal(x, expected if comm.rank == dst else given(comm.rank, 3, 5), dst)
            assert untouched()


def reduce_scatter(comm: Comm, sweep: bool = False) -> None:
    n, rank = comm.size, comm.rank
    for dtype, numel in kinds(sweep):
        for op in ops_of(dtype):
            whole = reduced(everyones(comm, n * numel, dtype=dtype), op)
            for way in WAYS[: 1 + (sweep or op == "sum")]:
                x, out = given(rank, n * numel, dtype=dtype), torch.empty(numel, dtype=dtype)
                way(comm.reduce_scatter_tensor, out, x, op)
                equal(out, whole[rank * numel : (rank + 1) * numel], (dtype, op, numel))
                equal(x, given(rank, n * numel, dtype=dtype), "what was given is kept")
    for uneven in _uneven(n):
        parts = [given(rank, numel, salt=i) for i, numel in enumerate(uneven)]
        expected = reduced(everyones(comm, uneven[rank], salt=rank), "sum")
        for way in WAYS:
            for out, untouched in layouts(torch.zeros(uneven[rank])):
                ins = [x.clone() for x in parts]
                way(comm.reduce_scatter, out, ins)
                equal(out, expected, uneven)
                assert untouched() and all(map(torch.equal, ins, parts))
        comm.reduce_scatter(out := torch.zeros(uneven[rank]), [_slanted(x) for x in parts])
        equal(out, expected, "from strided parts")
    comm.reduce_scatter(out := torch.zeros(6), [one_for_all(given(rank, 1))] * n)
    equal(out, reduced(everyones(comm, 1), "sum").expand(6), "from expanded parts")
    for part in range(n):  # into the memory of what was given: one's own part, or another's
        x = given(rank, 7 * n)
        comm.reduce_scatter_tensor(x[7 * part : 7 * part + 7], x)
        whole = reduced(everyones(comm, 7 * n), "sum")
        equal(x[7 * part : 7 * part + 7], whole[7 * rank : 7 * rank + 7], f"into part {part}")


# --- collectives that move ---------------------------------------------------------------------


def broadcast(comm: Comm, sweep: bool = False) -> None:
    for src in range(comm.size):
        for dtype, numel in kinds(sweep, src):
            x = given(comm.rank, numel, dtype=dtype)
            WAYS[numel % 2](comm.broadcast, x, src)
            equal(x, given(src, numel, dtype=dtype), (src, dtype, numel))
        for shape in ((), (3, 5)):
            for x, untouched in layouts(given(comm.rank, *shape)):
                comm.broadcast(x, src)
                equal(x, given(src, *shape), (src, x.stride()))
                assert untouched()


def all_gather(comm: Comm, sweep: bool = False) -> None:
    n, rank = comm.size, comm.rank
    for dtype, numel in kinds(sweep):
        for way in WAYS:
            out = torch.empty(n * numel, dtype=dtype)
            way(comm.all_gather_into_tensor, out, given(rank, numel, dtype=dtype))
            equal(out, torch.cat(everyones(comm, numel, dtype=dtype)), (dtype, numel))
    for uneven in _uneven(n):
        for way in WAYS:
            outs = [torch.zeros(numel) for numel in uneven]
            way(comm.all_gather, outs, given(rank, uneven[rank]))
            for r in range(n):
                equal(outs[r], given(r, uneven[r]), uneven)
    for x, _ in layouts(given(rank, 3, 5)):
        table = torch.zeros(3, 5, n)
        comm.all_gather([table[..., r] for r in range(n)], x)
        equal(table, torch.stack(everyones(comm, 3, 5), -1), "into columns")
    comm.all_gather(outs := [torch.zeros(6) for _ in range(n)], one_for_all(given(rank, 1)))
    equal(torch.stack(outs), torch.stack(everyones(comm, 1)).expand(n, 6), "expanded")
    for part in range(n):  # from the memory that is written: one's own part, or another's
        out = torch.zeros(n, 7)
        out[part] = given(rank, 7)
        comm.all_gather_into_tensor(out, out[part])
        equal(out, torch.stack(everyones(comm, 7)), f"from part {part}")


def gather_and_scatter(comm: Comm, sweep: bool = False) -> None:
    n, rank = comm.size, comm.rank

    def gather(root: int, way: Any, sizes: list[int], dtype: torch.dtype = torch.float32) -> None:
        outs = [torch.zeros(size, dtype=dtype) for size in sizes] if rank == root else None
        way(comm.gather, given(rank, sizes[rank], dtype=dtype), outs, root)
        for r, out in enumerate(outs or ()):
            equal(out, given(r, sizes[r], dtype=dtype), (root, dtype, sizes))

    def scatter(root: int, way: Any, sizes: list[int], out: torch.Tensor) -> None:
        ins = [given(r, size, dtype=out.dtype) for r, size in enumerate(sizes)]
        way(comm.scatter, out, ins if rank == root else None, root)
        equal(out, ins[rank], (root, out.dtype, sizes))

    for root in range(n):
        for dtype, numel in kinds(sweep, root):
            gather(root, WAYS[numel % 2], [numel] * n, dtype)
            scatter(root, WAYS[numel % 2], [numel] * n, torch.empty(numel, dtype=dtype))
        for uneven in _uneven(n):
            gather(root, block, uneven)
            places = list(layouts(torch.zeros(uneven[rank])))
            for out, untouched in places if sweep or root == 0 else places[root : root + 1]:
                scatter(root, block, uneven, out)
                assert untouched()


def all_to_all(comm: Comm, sweep: bool = False) -> None:
    n, rank = comm.size, comm.rank

    def sent(source: int, target: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return given(source, (2 * source + 3 * target) % 5, dtype=dtype, salt=target)  # 0 to 4

    for dtype in ALL:
        for way in WAYS:
            ins = [sent(rank, target, dtype) for target in range(n)]
            outs = [torch.empty_like(sent(source, rank, dtype)) for source in range(n)]
            way(comm.all_to_all, outs, ins)
            for source in range(n):
                equal(outs[source], sent(source, rank, dtype), (source, dtype))
    for numel in SIZES:
        everything = everyones(comm, n, numel)
        expected = torch.stack([x[rank] for x in everything])
        for way in WAYS:
            out, x = torch.empty(n, numel), everything[rank].clone()
            way(comm.all_to_all_single, out, x)
            equal(out, expected, numel)
            equal(x, everything[rank], "what was given is kept")
        x = everything[rank].clone()
        comm.all_to_all_single(x, x)
        equal(x, expected, "in place")


def ring_exchange(comm: Comm, sweep: bool = False) -> None:
    n, rank = comm.size, comm.rank
    for dtype, numel in kinds(sweep):
        before = given((rank - 1) % n, numel, dtype=dtype)
        for way in WAYS:
            x, out = given(rank, numel, dtype=dtype), torch.empty(numel, dtype=dtype)
            way(comm.ring_exchange, out, x)
            equal(out, before, (dtype, numel))
            equal(x, given(rank, numel, dtype=dtype), "what was given is kept")
        comm.ring_exchange(x, x)
        equal(x, before, "in place")
    for (out, untouched), (x, _) in zip(layouts(torch.zeros(3, 5)), layouts(given(rank, 3, 5))):
        comm.ring_exchange(out, x)
        equal(out, given((rank - 1) % n, 3, 5), x.stride())
        assert untouched()


def objects_and_barrier(comm: Comm) -> None:
    objects = comm.all_gather_object({"rank": comm.rank, "long": "x" * 1000 * comm.rank, 1: None})
    assert objects == [{"rank": r, "long": "x" * 1000 * r, 1: None} for r in range(comm.size)]
    for src in range(comm.size):
        received = comm.broadcast_object(["of", comm.rank, "x" * comm.rank], src)
        assert received == ["of", src, "x" * src]
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.01)
        came_s = time.monotonic()
        comm.barrier()
        left_s = time.monotonic()
        times = comm.all_gather_object((came_s, left_s))
        assert max(came for came, _ in times) <= min(left for _, left in times), times


# --- point to point, and many things at once ---------------------------------------------------


def point_to_point(comm: Comm, sweep: bool = False) -> None:
    n, rank = comm.size, comm.rank
    if n == 1:
        return
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    for dtype, numel in kinds(sweep):
        arriving = torch.empty(numel, dtype=dtype)
        receive = comm.irecv(arriving, behind)
        comm.send(given(rank, numel, dtype=dtype), ahead)
        receive.wait()
        equal(arriving, given(behind, numel, dtype=dtype), (dtype, numel))
    places = list(layouts(torch.zeros(3, 5)))
    for k, (leaving, _) in enumerate(layouts(given(rank, 3, 5))):
        send = comm.isend(leaving, ahead, tag=7)
        arriving, untouched = places[(k + 2) % len(places)]
        comm.recv(arriving, behind, tag=7)
        send.wait()
        equal(arriving, given(behind, 3, 5), k)
        assert untouched()
    send = comm.isend(one_for_all(given(rank, 1)), ahead)
    comm.recv(arriving := torch.zeros(6), behind)
    send.wait()
    equal(arriving, given(behind, 1).expand(6), "expanded")
    # messages under one tag arrive in order; those under another may be taken before
    sends = [comm.isend(given(rank, 9, salt=k), ahead, tag=k % 2) for k in range(6)]
    for k in (1, 3, 5, 0, 2, 4):
        arriving = torch.empty(9)
        comm.recv(arriving, behind, tag=k % 2)
        equal(arriving, given(behind, 9, salt=k), f"message {k}")
    wait_for(reversed(sends))
    # nobody keeps the handle
    for k in range(3):
        comm.isend(given(rank, 100_000, salt=k), ahead)
    for k in range(3):
        arriving = torch.empty(100_000)
        comm.recv(arriving, behind)
        equal(arriving, given(behind, 100_000, salt=k), f"forgotten message {k}")


def in_flight(comm: Comm) -> None:
    """Many asynchronous operations at once, waited for out of order, between blocking ones."""
    n, rank = comm.size, comm.rank
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    under_way: list[tuple[torch.Tensor, torch.Tensor, Handle | None]] = []
    for k in range(12):
        numel = (k * 97) % 301
        x = given(rank, numel, salt=k)
        expected = reduced(everyones(comm, numel, salt=k), "sum")
        under_way.append((x, expected, comm.all_reduce(x, async_op=True)))
        parts, out = given(rank, n, numel, salt=k), torch.zeros(numel)
        handle = comm.reduce_scatter(out, list(parts), async_op=True)
        under_way.append((out, reduced(everyones(comm, n, numel, salt=k), "sum")[rank], handle))
        y = given(rank, 5, salt=k)
        comm.all_reduce(y, "max")  # blocking, while those are in flight
        equal(y, reduced(everyones(comm, 5, salt=k), "max"), k)
        if n > 1:
            arriving = torch.zeros(numel)
            receive = comm.irecv(arriving, behind, tag=k)
            comm.isend(given(rank, numel, salt=k), ahead, tag=k)
            under_way.append((arriving, given(behind, numel, salt=k), receive))
    order = torch.randperm(len(under_way), generator=torch.Generator().manual_seed(rank))
    for k in order.tolist():  # each rank in an order of its own
        x, expected, handle = under_way[k]
        assert handle is not None
        handle.wait()
        handle.wait()  # waiting twice is allowed
        assert handle.is_completed()
        equal(x, expected, k)


def completion(comm: Comm) -> None:
    """`is_completed` turns true with nobody waiting, and only once it is so."""
    x = given(comm.rank, 10)
    if comm.rank == 0:
        assert comm.size == 1 or not comm.irecv(torch.zeros(1), comm.size - 1, 9).is_completed()
    comm.barrier()
    if comm.rank == comm.size - 1 and comm.size > 1:
        comm.send(torch.zeros(1), 0, 9)
    handles = [comm.all_reduce(x, async_op=True)]
    if comm.size > 1:
        handles += [comm.irecv(torch.zeros(10), (comm.rank - 1) % comm.size)]
        handles += [comm.isend(torch.ones(10), (comm.rank + 1) % comm.size)]
    for handle in handles:
        assert handle is not None
        while not handle.is_completed():  # a hang ends in the time-out of the test
            time.sleep(0.001)
        handle.wait()
    equal(x, reduced(everyones(comm, 10), "sum"))


def in_pieces(comm: Comm) -> None:
    n, rank = comm.size, comm.rank
    numel = n * 600_000 + 1  # 2.4 MB a chunk: two pieces
    for way in WAYS:
        x = given(rank, numel)
        way(comm.all_reduce, x, "mean")
        equal(x, reduced(everyones(comm, numel), "mean"))
    uneven = [300_000 * r + 1 for r in range(n)]
    outs = [torch.zeros(size) for size in uneven]
    comm.all_gather(outs, given(rank, uneven[rank]))
    for r in range(n):
        equal(outs[r], given(r, uneven[r]), r)
    out, ins = torch.zeros(uneven[rank]), [given(rank, size) for size in uneven]
    comm.reduce_scatter(out, ins)
    equal(out, reduced(everyones(comm, uneven[rank]), "sum"))


MOVING = (broadcast, all_gather, gather_and_scatter, all_to_all, ring_exchange, point_to_point)
SWEPT = (all_reduce, reduce, reduce_scatter, *MOVING)  # those that take `sweep`
CONTRACT: Any = (*SWEPT, objects_and_barrier, in_flight, completion, in_pieces)


def check(comm: Comm) -> None:
    for part in CONTRACT:
        part(comm)


def check_thoroughly(comm: Comm) -> None:
    """Every operation, reduction, dtype and size with each other."""
    for part in SWEPT:
        part(comm, sweep=True)


# --- bytes -------------------------------------------------------------------------------------


def events_of(comm: Comm, numel: int) -> dict[str, CommEvent]:
    """One event of each operation on float32 tensors of (about) `numel` elements in all."""
    n, rank = comm.size, comm.rank
    sizes = [numel // n + (r < numel % n) for r in range(n)]
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    x, own = torch.ones(numel), torch.ones(sizes[rank])
    parts = [torch.ones(size) for size in sizes]
    with listen() as events:
        comm.all_reduce(x)
        comm.reduce(x, dst=n - 1)
        comm.broadcast(x, src=n - 1)
        comm.reduce_scatter(own, parts)
        comm.all_gather(parts, own)
        comm.gather(torch.ones(5), [torch.ones(5)] * n if rank == 0 else None)
        comm.scatter(torch.ones(5), [torch.ones(5)] * n if rank == 0 else None)
        comm.all_to_all_single(torch.ones(5 * n), torch.ones(5 * n))
        comm.ring_exchange(torch.ones(numel), x)
        comm.barrier()
        if n > 1:
            send = comm.isend(x, ahead)
            comm.recv(x, behind)
            send.wait()
    assert len({event.op for event in events}) == len(events)
    return {event.op: event for event in events}


def check_bytes(ranks: list[dict[str, CommEvent]], numel: int) -> None:
    """`ranks` are the `events_of` all ranks; every count follows the formula, to the byte."""
    n, whole_bytes, five_bytes = len(ranks), 4 * numel, 20
    fives = ("gather", "scatter", "all_to_all")  # of 5 elements for each rank

    def counts(op: str, name: str) -> list[int]:
        return [getattr(events[op], name) for events in ranks]

    def share(r: int) -> int:
        return 4 * (numel // n + (r % n < numel % n))

    payload = dict.fromkeys(fives, n * five_bytes) | {"barrier": 0}
    for op in ranks[0]:
        assert counts(op, "payload_bytes") == [payload.get(op, whole_bytes)] * n, op

    others = [whole_bytes - share(r) for r in range(n)]  # all but one's own
    nexts = [whole_bytes - share(r + 1) for r in range(n)]  # all but the next rank's
    bus = {
        "all_reduce": [a + b for a, b in zip(others, nexts)],
        "reduce_scatter": others,
        "all_gather": nexts,
        **dict.fromkeys(("reduce", "broadcast", "ring_exchange", "send"), [whole_bytes] * n),
        **dict.fromkeys(fives, [(n - 1) * five_bytes] * n),
        **dict.fromkeys(("barrier", "recv"), [0] * n),
    }
    for op in ranks[0]:
        assert counts(op, "bus_bytes") == bus[op], op
    assert sum(bus["all_reduce"]) == 2 * (n - 1) * whole_bytes
    assert sum(bus["reduce_scatter"]) == sum(bus["all_gather"]) == (n - 1) * whole_bytes

    for op in ranks[0]:
        sizes = [5] * n if op in fives else [share(r) // 4 for r in range(n)]
        itemsize = 1 if op == "barrier" else 4  # a byte to tell in each round of the barrier
        for rank, event in enumerate(events[op] for events in ranks):
            if event.transport == "shm":
                expected_bytes = copied_bytes(op, n, rank, whole_bytes, share(rank))
            elif op in ("send", "recv"):
                expected_bytes = event.bus_bytes
            else:
                call = Call(sizes, rank, event.peer or 0, [range(n)])
                expected_bytes = sent_bytes(op, event.algorithm, itemsize, call)
            assert event.wire_bytes == expected_bytes, (op, event.algorithm, rank)


def copied_bytes(op: str, n: int, rank: int, whole_bytes: int, own_bytes: int) -> int:
    """What a rank copies into and out of shared memory, of tensors small enough that all reduce."""
    into_and_out = {
        **dict.fromkeys(("all_reduce", "reduce"), (whole_bytes, 0)),
        "reduce_scatter": (whole_bytes - own_bytes, 0),
        "all_gather": (own_bytes, whole_bytes - own_bytes),
        "broadcast": (whole_bytes, 0) if rank == n - 1 else (0, whole_bytes),
        "gather": (0, (n - 1) * 20) if rank == 0 else (20, 0),
        "scatter": ((n - 1) * 20, 0) if rank == 0 else (0, 20),
        "all_to_all": ((n - 1) * 20, (n - 1) * 20),
        "ring_exchange": (whole_bytes, whole_bytes),
        "barrier": (0, 0),
        "send": (whole_bytes, 0),
        "recv": (0, whole_bytes),
    }
    return sum(into_and_out[op])


def kernel_sent_bytes() -> int:
    """What the kernel has carried over this machine's loopback, whoever sent it."""
    interfaces = psutil.net_io_counters(pernic=True)
    return int(next(interfaces[name].bytes_sent for name in ("lo", "lo0") if name in interfaces))


def check_kernel_bytes(world: World, op: str, whole_bytes: int = 16_000_000) -> None:
    """The kernel carries what the formula says, and the events count all of it."""
    n = world.size

    def operate() -> int:
        comm = Comm()
        whole, part = torch.ones(whole_bytes // 4), torch.ones(whole_bytes // 4 // n)
        with listen() as events:
            if op == "reduce_scatter":
                comm.reduce_scatter_tensor(part, whole)
            elif op == "all_gather":
                comm.all_gather_into_tensor(whole, part)
            else:
                comm.all_reduce(whole)
        return events[0].wire_bytes

    moved_bytes = []
    for _ in range(4):  # others may use the loopback meanwhile: the fewest counts
        before_bytes = kernel_sent_bytes()
        counted_bytes = sum(world.run(operate))
        moved_bytes.append(kernel_sent_bytes() - before_bytes)
    expected_bytes = (n - 1) * whole_bytes * (2 if op == "all_reduce" else 1)
    assert counted_bytes == expected_bytes, op
    assert expected_bytes <= min(moved_bytes) < 1.2 * expected_bytes, (op, moved_bytes)


# --- parts -------------------------------------------------------------------------------------


def _uneven(n: int) -> list[list[int]]:
    """Sizes for the ranks of a group: some empty, some large, none equal."""
    return [[(3 * r + 1) % 7 for r in range(n)], [0] * (n - 1) + [11], [1000] + [0] * (n - 1)]


def _slanted(x: torch.Tensor) -> torch.Tensor:
    layout = list(layouts(x))[3][0]
    assert layout.numel() < 2 or not layout.is_contiguous()
    return layout
