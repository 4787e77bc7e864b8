"""Shared memory beside gloo: the door's operations through memory that the ranks share, and the
same operations of torch's gloo group, called directly, in turns in one run of one world.

Also the machine's copy rate in the same run: a tensor of the same size into another, all ranks at
once as in a collective. "of copy rate" is the rate at which an operation copies (its `wire_bytes`
over its time) as a fraction of it. From memory's point of view a copy into a slot is half a copy,
since the slots stay in the cache: a large all-reduce can come out above 100 %.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table

from labkit.comm import Comm, listen
from labkit.world import World

SIZES = tuple(4096 * 4**k for k in range(8))  # bytes: 4 KiB to 64 MiB
RANKS = (2, 4)
TURNS, TURN_S = 7, 0.03  # each side has so many turns, and calls about so long in each
COPIED_BYTES = 1 << 27  # in all, to time one copy
Calls = tuple[Callable[[], object], Callable[[], object]]  # ours, gloo's


@dataclass(frozen=True)
class ShmTimes:
    """One operation at one size, medians over the turns: seconds of a call over shared memory and
    over gloo, and their ratio in the same turn; the bytes that a rank copies in it, and the rate at
    which a rank copies beside the others."""

    op: str
    ranks: int
    nbytes: int
    shm_s: float
    gloo_s: float
    ratio: float
    copied_bytes: int
    copy_bytes_per_s: float

    @property
    def of_copy_rate(self) -> float:
        return self.copied_bytes / self.shm_s / self.copy_bytes_per_s


def _calls(comm: Comm, nbytes: int) -> dict[str, Calls]:
    n = comm.size
    gloo = comm.group
    whole = torch.zeros(nbytes // 4)  # sums of it stay what they are
    part = torch.zeros(nbytes // 4 // n)
    calls: dict[str, Calls] = {
        "all_reduce": (
            lambda: comm.all_reduce(whole),
            lambda: gloo.allreduce([whole]).wait(),
        ),
        "reduce_scatter": (
            lambda: comm.reduce_scatter_tensor(part, whole),
            lambda: gloo._reduce_scatter_base(part, whole).wait(),
        ),
        "all_gather": (
            lambda: comm.all_gather_into_tensor(whole, part),
            lambda: gloo._allgather_base(whole, part).wait(),
        ),
    }
    peer = comm.rank ^ 1  # ranks 0 and 1, 2 and 3

    def there_and_back(send: Callable[..., object], receive: Callable[..., object]) -> None:
        for one in (send, receive) if comm.rank < peer else (receive, send):
            one(whole, peer)

    calls["there and back"] = (
        lambda: there_and_back(comm.send, comm.recv),
        lambda: there_and_back(
            lambda x, peer: gloo.send([x], peer, 0).wait(),
            lambda x, peer: gloo.recv([x], peer, 0).wait(),
        ),
    )
    return calls


def _seconds(comm: Comm, call: Callable[[], object], repeat: int) -> float:
    comm.barrier()
    began_s = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - began_s) / repeat


def _copy_bytes_per_s(comm: Comm, nbytes: int) -> float:
    """From one tensor of this size to another, of a rank while the others copy too."""
    x, y = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    repeat = max(1, COPIED_BYTES // nbytes)
    return nbytes / statistics.median(_seconds(comm, lambda: y.copy_(x), repeat) for _ in range(7))


def _measure(sizes: tuple[int, ...]) -> list[ShmTimes]:
    """On every rank."""
    comm, found = Comm(), []
    for nbytes in sizes:
        copy_bytes_per_s = _copy_bytes_per_s(comm, nbytes)
        for op, (ours, theirs) in _calls(comm, nbytes).items():
            with listen() as events:
                ours()
            copied_bytes = sum(event.wire_bytes for event in events)
            once_s = torch.tensor(_seconds(comm, theirs, 2))
            comm.all_reduce(once_s, "max")  # all ranks must repeat as often
            repeat = max(1, min(200, int(TURN_S / float(once_s))))
            turns = [
                (_seconds(comm, ours, repeat), _seconds(comm, theirs, repeat)) for _ in range(TURNS)
            ]
            shm_s, gloo_s = (statistics.median(side) for side in zip(*turns))
            ratio = statistics.median(shm_s / gloo_s for shm_s, gloo_s in turns)
            times = (shm_s, gloo_s, ratio)
            found.append(ShmTimes(op, comm.size, nbytes, *times, copied_bytes, copy_bytes_per_s))
    return found


def bench_shm(
    ranks: tuple[int, ...] = RANKS, sizes: tuple[int, ...] = SIZES, check: bool = False
) -> list[ShmTimes]:
    """Measure every operation at every size, on worlds of `ranks`; rank 0's times."""
    found: list[ShmTimes] = []
    for n in ranks:
        with World(n, transport="shm", check=check) as world:
            found += world.run(_measure, sizes)[0]
    return found


def table(found: list[ShmTimes]) -> Table:
    """What `bench_shm` found."""
    shown = Table(
        title="Shared memory beside gloo (aim: geometric mean at most 0.3, worst 0.6)",
        title_justify="left",
    )
    for name in ("", "ranks", "bytes", "shm us", "gloo us", "ratio", "of copy rate"):
        shown.add_column(name, justify="left" if not name else "right")
    for op, n in dict.fromkeys((one.op, one.ranks) for one in found):
        rows = [one for one in found if (one.op, one.ranks) == (op, n)]
        for one in rows:
            shown.add_row(
                op, str(n), f"{one.nbytes:,}", f"{one.shm_s * 1e6:,.0f}",
                f"{one.gloo_s * 1e6:,.0f}", f"{one.ratio:.2f}", f"{one.of_copy_rate:.0%}",
            )  # fmt: skip
        mean = math.exp(statistics.fmean(math.log(one.ratio) for one in rows))
        worst = max(one.ratio for one in rows)
        shown.add_row("", "", "", "mean, worst", "", f"{mean:.2f}, {worst:.2f}", "")
        shown.add_section()
    return shown
