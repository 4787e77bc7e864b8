"""Faulty shared memory must turn its tests red."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_contract as contract
from comm_contract import check_bytes, events_of
from harness import Change, Edit, edits, instead, noticed, on_ranks
from labkit import Comm, RankError, World
from labkit.runtime.transports.shm import collectives, ring, slots, transport
from test_shm import ours_and_gloos, use_everything, with_tiny_pieces

pytestmark = pytest.mark.slow


def bits(_: Comm) -> None:
    ours_and_gloos("sum")


def fast_root(comm: Comm) -> None:
    """Rank 0 broadcasts one tensor after the other while the others are still asleep."""
    for first in range(0, 40, 10):
        for k in range(first, first + 10):
            if comm.rank:
                time.sleep(0.002)
            comm.broadcast(x := torch.full((100,), float(k if comm.rank == 0 else -1)), src=0)
            assert x.eq(k).all(), (k, x[0])


def send_ends_when_received(comm: Comm) -> None:
    if comm.rank == 0:
        handle = comm.isend(torch.ones(3), 1, tag=1)
        comm.send(torch.ones(3), 1, tag=2)  # so that the first has come out of the ring
        assert not handle.is_completed()
        comm.barrier()
        handle.wait()
    elif comm.rank == 1:
        comm.recv(torch.ones(3), 0, tag=2)
        comm.barrier()
        comm.recv(torch.ones(3), 0, tag=1)
    else:
        comm.barrier()


OF_ALL = "for rank in range(slots.size)\n    ]\n    _reduce_parts("
WRONG_RESULTS = [
    *edits(
        collectives,
        ("forgets the last rank", OF_ALL, OF_ALL.replace("size", "size - 1"), contract.all_reduce),
        ("begins with itself",  # right but for rounding: each slice in another order
         OF_ALL, OF_ALL.replace("range(slots.size)", "(slots.rank, *slots.others)"), bits),
        ("forgets the division", 'if op == "mean":', "if False:", contract.all_reduce),
        ("never sees shared memory",
         "if share_memory(out, *chunks) else", "if False else", contract.reduce_scatter),
    ),
    *edits(
        slots,
        ("does not wait", "self._wait(ranks, stage, self._piece)", "pass", contract.all_gather),
        ("overwrites what is read",
         "self._wait(self.others, DONE, self._piece - BUFFERS)", "pass", fast_root),
        ("takes from the first",
         "self._address(rank, begin), x.nbytes", "self._address(self.others[0], begin), x.nbytes",
         contract.all_gather),
        ("knows its own length only",
         "for rank in range(self.size)]", "for rank in [self.rank]]", contract.gather_and_scatter),
    ),
    *edits(
        ring,
        ("ignores tags",
         "received = Received(self, x)", "received, tag = Received(self, x), 0",
         contract.point_to_point),
        ("expects no tags",
         "self._messages += 1\n        received",
         "self._messages, tag = self._messages + 1, 0\n        received", contract.point_to_point),
        ("announces what is kept as taken",
         "self._kept[tag].append(message)",
         "self._kept[tag].append(message)\n            "
         "self.region.announce(taken_word(message.number), message.number)",
         send_ends_when_received),
        ("stops at the end of the ring",
         "while done < nbytes:", "if done < nbytes:", contract.point_to_point),
    ),
    *edits(
        transport,
        ("overtakes those under way",
         "call.asynchronous or not (self._last is None or self._last.is_completed())",
         "call.asynchronous", contract.in_flight),
    ),
]  # fmt: skip
counts_half = Edit("counts half", slots.__name__, "    return nbytes\n", "    return nbytes // 2\n")
keeps_its_name = instead("keeps_its_name", Path, "unlink", lambda *_, **__: None)


def in_tiny_pieces(world: World, change: Change, part: Callable[[Comm], None]) -> None:
    world.restart()
    world.run(with_tiny_pieces)
    on_ranks(world, change, lambda: part(Comm()))


shm = {"size": 4, "transport": "shm", "timeout_s": 3}
test_a_wrong_result_is_noticed = noticed(WRONG_RESULTS, in_tiny_pieces, RankError, **shm)


def test_a_missing_byte_is_noticed(worlds: Any) -> None:
    events = on_ranks(worlds(**shm), counts_half, lambda: events_of(Comm(), 1001))
    with pytest.raises(AssertionError):
        check_bytes(events, 1001)


def test_a_file_that_keeps_its_name_is_noticed(worlds: Any) -> None:
    worlds(**shm).restart()
    assert on_ranks(worlds(**shm), keeps_its_name, use_everything) != [[]] * 4


def test_without_a_fault_all_is_green(worlds: Any) -> None:
    world = worlds(4, transport="shm")  # which may wait for longer, where the machine is busy
    world.run(with_tiny_pieces)
    for part in {mutation.check for mutation in WRONG_RESULTS}:
        world.run(lambda part: part(Comm()), part)
