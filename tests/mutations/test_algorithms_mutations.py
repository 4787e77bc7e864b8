"""Faulty algorithms, and messages lost or sent twice, turn the tests of the algorithms red."""

from functools import partial

import pytest
import torch

from algorithm_cases import EVERY, Case, same_bits, serves, sizes_for, two_nodes
from comm_faults import FAULTS
from fake_wire import Deadlock, Mailbox, drive
from harness import Edit, Mutation, here, noticed
from labkit.comm.collectives import ALGORITHMS, all_reduce, barrier
from labkit.comm.collectives.steps import Algorithm
from labkit.events import chunk_sizes
from labkit.runtime.transports.wire import Wire
from tables import raises

pytestmark = pytest.mark.slow


def messages_of(collective: str, name: str, n: int) -> int:
    case = Case(collective, name, sizes_for(collective, name, n, 23), nodes=two_nodes(n))
    case.check()
    return case.mailbox.sent


@pytest.mark.parametrize(("collective", "name"), [case for case in EVERY if case[0] != "barrier"])
def test_every_message_of_every_algorithm_matters(collective: str, name: str) -> None:
    for n in filter(lambda n: serves(collective, name, n), (3, 4, 5)):
        for k in range(messages_of(collective, name, n)):
            for fault in ("lost", "doubled"):
                sizes = sizes_for(collective, name, n, 23)
                case = Case(collective, name, sizes, dtype=torch.float64, nodes=two_nodes(n))
                for rank, x in enumerate(case.whole):  # no zeros, which would not be missed
                    x.copy_(torch.arange(len(x)) + 100.0 * (rank + 1))
                setattr(case.mailbox, fault, k)
                raises("", case.check, error=AssertionError)


def passes(wire: Wire, late: int) -> Algorithm:
    """A barrier to which rank `late` never comes."""
    if wire.rank == late:
        yield wire.irecv(torch.empty(1), (late + 1) % wire.size, 99)
    note = torch.zeros(1, dtype=torch.uint8)
    return (yield from ALGORITHMS["barrier"]["dissemination"](wire, note, 7))


def test_no_rank_passes_a_barrier_before_all_have_arrived() -> None:
    def deadlock(n: int, late: int) -> str:
        start = partial(passes, late=late)
        return str(raises("", drive, Mailbox(n, late=True), start, error=Deadlock))

    for n in range(2, 9):
        all_wait = f"ranks {list(range(n))} wait for each other"
        for late in range(n):
            assert deadlock(n, late) == all_wait, "a rank left"
    too_short = "distance < wire.size", "2 * distance < wire.size"
    with Edit("one round less", barrier.__name__, *too_short)():
        assert deadlock(n, 0) != all_wait, "of 8 ranks, some leave"


def test_an_order_of_adding_that_depends_on_the_rank_is_noticed() -> None:
    """The sums are right; only bits show it."""
    lower_first = "(incoming, total) if wire.rank & reach else (total, incoming)"
    with Edit("adds its own first", all_reduce.__name__, lower_first, "(total, incoming)")():
        Case("all_reduce", "recursive_doubling", chunk_sizes(23, 4)).check()
        raises("", same_bits, "recursive_doubling", "min", 4, error=AssertionError)


def ring_case(collective: str) -> None:
    name = {"broadcast": "tree", "all_to_all": "pairwise", "ring_exchange": "next"}
    Case(collective, name.get(collective, "ring"), chunk_sizes(24, 4)).check()


NOTICED_IN = {
    "reduce_scatter": ["skips a step", "leaves partial sums in its input", "is an all-reduce",
                       "is an all-reduce and hides it"],
    "all_reduce": ["skips a step"],
    "all_gather": ["gathers twice", "gathers twice and hides it", "counts half",
                   "gathers in another order"],
    "broadcast": ["stops a round early", "sends all from the root"],
    "all_to_all": ["forgets the last peer"],
    "ring_exchange": ["returns its own tensor"],
}  # fmt: skip
MUTATIONS = [
    Mutation(FAULTS[label], ring_case, collective)
    for collective, labels in NOTICED_IN.items()
    for label in labels
]
test_a_faulty_algorithm_is_noticed_on_simulated_ranks = noticed(MUTATIONS, here, AssertionError)


def test_the_mailbox_finds_what_is_read_or_written_too_early() -> None:
    def swap(wire: Wire, early: str) -> Algorithm:
        x, y = torch.full((3,), float(wire.rank)), torch.zeros(3)
        receive = wire.irecv(y, 1 - wire.rank, 0)
        send = wire.isend(x, 1 - wire.rank, 0)
        if early == "write":
            x.fill_(9.0)
        if early != "read":
            yield receive
            yield send
        assert y.tolist() == [1.0 - wire.rank] * 3
        if early == "read":
            yield receive
            yield send
        return 12

    assert drive(Mailbox(2, late=True), lambda wire: swap(wire, "nothing")) == [12, 12]
    for early in ("read", "write"):
        raises("", drive, Mailbox(2, late=True), partial(swap, early=early), error=AssertionError)


def test_the_mailbox_finds_deadlocks_and_messages_left_over() -> None:
    def all_receive_first(wire: Wire) -> Algorithm:
        yield wire.irecv(torch.zeros(1), 1 - wire.rank, 0)
        yield wire.isend(torch.zeros(1), 1 - wire.rank, 0)
        return 4

    def sends_to_nobody(wire: Wire) -> Algorithm:
        wire.isend(torch.zeros(1), 1 - wire.rank, 0)
        yield from ()
        return 4

    raises("wait for each other", drive, Mailbox(2, late=False), all_receive_first, error=Deadlock)
    with pytest.raises(AssertionError, match="only one of the two knows"):
        drive(Mailbox(2, late=False), sends_to_nobody)
