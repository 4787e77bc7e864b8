"""Every way in which a run can fail, provoked for real: each ends in one `RankError` that says
which rank, where and why, and in a world whose next run works."""

import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit import CollectiveMismatch, Comm, CommError, Link, RankError, RankInterrupt, World
from provoke import gone, interrupted, until
from tables import cases, raises
from worlds import on_each_rank, on_ranks_of_its_own, world_fixture

PATIENCE_S = 10.0  # "within 2 s" on a machine that has other things to do

world = world_fixture(4, timeout_s=60)
hasty = world_fixture(3, timeout_s=2)


def failure(world: World, fn: Callable[..., Any], *args: Any, **expected: Any) -> str:
    """The text of a run's error, whose kind and ranks are those expected; after it the world must
    work as if nothing had been."""
    error = raises("", world.run, fn, *args, error=RankError)
    assert_works(world)
    assert not isinstance(error, KeyboardInterrupt)
    assert {name: getattr(error, name) for name in expected} == expected, error
    return str(error)


def quick_failure(world: World, fn: Callable[..., Any], *args: Any, **expected: Any) -> str:
    with soon():
        return failure(world, fn, *args, **expected)


def assert_works(world: World) -> None:
    assert world.run(sum_of_ones) == [world.size] * world.size, "the next run works in any case"


def sum_of_ones() -> float:
    x = torch.ones(1)
    Comm().all_reduce(x)
    return x.item()


def line_of(text: str) -> int:
    """The number of the only line of this file that ends with the comment `text`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (k for k, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return number


@contextmanager
def soon() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < PATIENCE_S


# ---- exceptions


def fail_deep_inside(rank: int) -> None:
    if Comm().rank == rank:
        raise KeyError("the key of the test")  # the cause
    sum_of_ones()  # the others hang here


def test_an_exception_names_its_rank_and_shows_its_source_lines(world: World) -> None:
    with soon(), pytest.raises(RankError) as info:
        world.run(fail_deep_inside, 2)
    assert_works(world)
    error, text = info.value, str(info.value)
    assert error.kind == "raised" and error.ranks == (2,), "ranks that only suffered are not blamed"
    assert text.startswith("rank 2 raised KeyError: 'the key of the test'")
    assert "Traceback (most recent call last)" in text and "CommError" not in text
    assert 'raise KeyError("the key of the test")' in text
    assert f"line {line_of('the cause')}, in fail_deep_inside" in text
    assert "ranks 0, 1 and 3 stopped" in text
    assert "labkit/runtime" not in text, "the rank's own loop is of no interest"
    (shown,) = error._render_traceback_()  # in a notebook
    assert shown == f"RankError: {text}", "without the driver's own frames"


def test_equal_exceptions_are_reported_once_and_different_ones_each(world: World) -> None:
    def fail(kinds: int) -> None:
        raise ValueError(f"of {Comm().rank % kinds}")

    text = failure(world, fail, 1, ranks=(0, 1, 2, 3))
    assert text.count("Traceback") == 1 and " raised ValueError: of 0" in text
    text = failure(world, fail, 2, ranks=(0, 1, 2, 3))
    assert "ranks 0 and 2 raised ValueError: of 0" in text
    assert "ranks 1 and 3 raised ValueError: of 1" in text


def test_an_exception_of_a_cell_shows_the_line_of_the_cell(world: World) -> None:
    source = "def f(x):\n    return 1 // x\n\nf(rank - 1)"
    words = ("ZeroDivisionError", "return 1 // x", "f(rank - 1)", 'File "<cell>", line 2, in f')
    assert raises(words, world.run_cell, source, "<cell>", error=RankError).ranks == (1,)
    assert_works(world)


def test_causes_contexts_notes_and_groups_are_reported(world: World) -> None:
    def chained() -> None:
        try:
            1 // 0  # noqa: B018
        except ZeroDivisionError as error:
            error.add_note("note of the test")
            raise ValueError("outer") from error

    def during() -> None:
        try:
            1 // 0  # noqa: B018
        except ZeroDivisionError:
            raise ValueError("outer")  # noqa: B904

    def grouped() -> None:
        raise ExceptionGroup("several", [KeyError("one of them"), OSError("the other")])

    def circle() -> None:
        first, second = ValueError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    text = failure(world, chained)
    assert text.index("ZeroDivisionError") < text.index("directly caused") < text.rindex("outer")
    assert "note of the test" in text
    assert "During handling of the above error" in failure(world, during)
    text = failure(world, grouped)
    assert "KeyError: 'one of them'" in text and "OSError: the other" in text
    assert failure(world, circle).count("ValueError: second") == 1


class Unpleasant(Exception):
    """Cannot be pickled, and has no text."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise SystemExit("no text")

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


class SpecialText(Exception):
    def __str__(self) -> str:
        class Text(str):
            __slots__ = ()

        return Text("special text")


class NotesThatRaise(ValueError):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise KeyError("no notes")


class NumberForNotes(ValueError):
    __notes__ = 7  # type: ignore[assignment]


class AttributesThatRaise(ValueError):
    def __getattribute__(self, name: str) -> object:
        raise KeyError(name)


@cases(
    (Unpleasant, "raised Unpleasant: (its message cannot be shown"),
    (SpecialText, "raised SpecialText: special text"),
    (lambda: NotesThatRaise("message"), "raised NotesThatRaise: message"),
    (lambda: NumberForNotes("message"), "raised NumberForNotes: message"),
    (lambda: AttributesThatRaise("message"), "raised AttributesThatRaise: message"),
    # The user's own, neither a hang nor a lost peer.
    (lambda: RuntimeError("Timed out waiting for my queue"), "Timed out waiting for my queue"),
    (lambda: RuntimeError("closed by peer"), "closed by peer"),
    (lambda: OSError("Connection reset, says my download"), "Connection reset, says my downl"),
    # An exit is an exception like others.
    (lambda: SystemExit(3), "raised SystemExit: 3"),
    (lambda: KeyboardInterrupt(3), "raised KeyboardInterrupt: 3"),
    (lambda: GeneratorExit(3), "raised GeneratorExit: 3"),
)
def test_an_unusual_exception_is_reported(make: Any, says: str, world: World) -> None:
    def fail() -> None:
        raise make()

    text = failure(world, fail, kind="raised", ranks=(0, 1, 2, 3))
    assert says in text and "in fail" in text


def test_a_very_long_story_is_cut_to_what_a_person_reads(world: World) -> None:
    def first(depth: int) -> None:
        second(depth)

    def second(depth: int) -> None:
        first(depth + 1)

    def verbose() -> None:
        raise ValueError("begin" + "x" * 10_000_000 + "end")

    text = failure(world, first, 0)
    assert "RecursionError" in text and "calls left out" in text and len(text) < 50_000
    text = failure(world, verbose)
    assert "begin" in text and "end" in text and "left out" in text and len(text) < 50_000


def test_output_before_a_failure_is_shown(world: World, printed: Callable[[], str]) -> None:
    def fail() -> None:
        if Comm().rank == 0:
            print("the last words", flush=False)
            raise ValueError
        while True:
            print("a rank goes on printing while another fails")

    failure(world, fail)
    assert "[rank 0] the last words" in printed()


def test_an_error_can_be_pickled_and_keeps_what_it_says() -> None:
    error = pickle.loads(pickle.dumps(RankError("text", "died", (2,))))
    assert (str(error), error.kind, error.ranks) == ("text", "died", (2,))
    assert isinstance(pickle.loads(pickle.dumps(RankInterrupt("text"))), RankInterrupt)


# ---- deaths


@cases(
    (signal.SIGKILL, "SIGKILL"),
    (signal.SIGTERM, "SIGTERM"),
    (signal.SIGRTMIN + 5, f"signal {signal.SIGRTMIN + 5}"),
)
def test_a_killed_rank_is_named_with_its_signal(number: int, name: str, world: World) -> None:
    def die() -> None:
        comm = Comm()
        comm.all_reduce(torch.ones(3))
        if comm.rank == 1:
            os.kill(os.getpid(), number)
        comm.all_gather_into_tensor(torch.ones(8), torch.ones(2))

    text = quick_failure(world, die, kind="died", ranks=(1,))
    assert f"rank 1 was killed by {name}" in text and "ranks 0, 2 and 3 stopped" in text
    assert "rank 1: died after all_reduce(sum) float32 [3], collective" in text
    assert "test_failures.py:" in text and " in die" in text
    assert all(f"  rank {rank}: " in text for rank in (0, 2, 3))


def test_a_crash_in_c_shows_the_line_of_python(world: World, printed: Callable[[], str]) -> None:
    def crash() -> None:
        import ctypes

        ctypes.string_at(0)

    assert "SIGSEGV" in failure(world, crash)
    out = printed()
    assert "Segmentation fault" in out and "in crash" in out


@pytest.mark.parametrize("where", ["computing", "in an operation"])
def test_a_rank_killed_from_outside_is_named_with_its_operation(world: World, where: str) -> None:
    victim = world.run(os.getpid)[1]

    def stay() -> None:
        if Comm().rank != 0 and where == "in an operation":
            Comm().all_reduce(torch.ones(5))
        time.sleep(600)

    threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    text = quick_failure(world, stay, ranks=(1,))
    assert "SIGKILL" in text
    if where == "in an operation":
        assert "rank 1: died in all_reduce(sum) float32 [5]" in text


@pytest.mark.parametrize("victims", [(3,), (0, 1, 2, 3)], ids=["one", "all"])
def test_ranks_that_died_between_runs_are_named(world: World, victims: tuple[int, ...]) -> None:
    pids = [world.run(os.getpid)[rank] for rank in victims]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert gone(pids)
    quick_failure(world, os.getpid, kind="died", ranks=victims)


@pytest.mark.parametrize("closes", [True, False])
def test_a_death_that_is_reported_late_is_waited_for(
    world: World, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a loaded machine the server reports a death late, and the kernel closes connections late:
    not before the last thread of the process has ended."""
    pids = world.run(os.getpid)
    ranks = world._alive
    assert ranks is not None
    starter, listen = ranks.starter, ranks.listen
    ends, since = starter.ends, time.monotonic()

    def late() -> dict:
        return {
            pid: end
            for pid, end in ends().items()
            if pid != pids[0] or time.monotonic() > since + 1
        }

    def without_rank_0(*args: Any) -> list:
        return [answer for answer in listen(*args) if closes or answer[0] != 0]

    monkeypatch.setattr(starter, "ends", late)
    monkeypatch.setattr(ranks, "listen", without_rank_0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert gone(pids)
    since = time.monotonic()
    failure(world, os.getpid, ranks=(0, 1, 2, 3))


def exits(status: int, operation: Callable[[], object] = sum_of_ones) -> Callable[[], None]:
    """Rank 2 ends before the operation that the others begin."""

    def fail() -> None:
        if Comm().rank == 2:
            os._exit(status)
        operation()

    return fail


def sum_by_torch() -> None:
    dist.all_reduce(torch.ones(2))


def close_the_connection() -> None:
    if Comm().rank == 2:
        labkit.attach().control.close()
        time.sleep(600)


def turn_the_error_into_another() -> None:
    try:
        sum_of_ones()
    except CommError:
        raise ValueError("the step failed") from None


@cases(
    (exits(7), "ended by itself with status 7"),
    (exits(0), "ended by itself with status 0"),
    (exits(5, sum_by_torch), "ended by itself with status 5"),
    (exits(3, turn_the_error_into_another), "ended by itself with status 3"),
    (close_the_connection, "closed the connection"),
    ids=["status 7", "status 0", "in torch's own operation", "peers raise others", "connection"],
)
def test_a_rank_that_ends_or_disconnects_is_named(fail: Any, says: str, world: World) -> None:
    assert f"rank 2 {says}" in quick_failure(world, fail, kind="died", ranks=(2,))


# ---- ranks that disagree


def disagreement(world: World, most: Callable[[], Any], rank_1: Callable[[], Any]) -> str:
    """What is said when rank 1 calls something else than the rest: at once, with each rank."""

    def differ() -> None:
        (rank_1 if Comm().rank == 1 else most)()

    text = quick_failure(world, differ, kind="disagree")
    for words in ("the ranks disagree about", "rank 0:", "rank 1:", "test_failures.py:"):
        assert words in text
    return text


def test_another_operation_is_reported_with_both_source_lines(world: World) -> None:
    text = disagreement(
        world,
        lambda: Comm().all_reduce(torch.ones(4)),  # of most ranks
        lambda: Comm().broadcast(torch.ones(4)),  # of rank 1
    )
    for operation, comment in (
        ("all_reduce(sum)", "of most ranks"),
        ("broadcast(src=0)", "of rank 1"),
    ):
        assert f"{operation} float32 [4]  at test_failures.py:{line_of(comment)}" in text
    assert "collective" in text and "group default" in text


Operation = tuple[Any, ...]  # of the default `Comm`: its name and arguments


def sum_of(*shape: int, dtype: torch.dtype = torch.float32) -> Operation:
    return "all_reduce", torch.ones(shape, dtype=dtype)


SUM, BROADCAST, BARRIER = sum_of(4), ("broadcast", torch.ones(4)), ("barrier",)
DISAGREEMENTS: dict[str, tuple[list[Operation], list[Operation], list[str]]] = {
    "shape": ([SUM], [sum_of(5)], ["[4]", "[5]"]),
    "dtype": ([SUM], [sum_of(4, dtype=torch.float64)], ["float32", "float64"]),
    "same number of elements": ([sum_of(2, 3)], [sum_of(3, 2)], ["[2, 3]", "[3, 2]"]),
    "reduction": ([SUM], [(*SUM, "max")], ["all_reduce(sum)", "all_reduce(max)"]),
    "root": ([(*BROADCAST, 0)], [(*BROADCAST, 1)], ["src=0", "src=1"]),
    "barrier": ([BARRIER], [SUM], ["barrier", "all_reduce"]),
    "one call too many": ([SUM, BARRIER], [SUM, SUM, BARRIER], ["barrier", "all_reduce"]),
    "async": ([(*SUM, "sum", True)], [(*sum_of(5), "sum", True)], ["[4]", "[5]"]),
}


@pytest.mark.parametrize(("most", "rank_1", "words"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_disagreement_is_reported_at_once(
    world: World, most: list[Operation], rank_1: list[Operation], words: list[str]
) -> None:
    def call(operations: list[Operation]) -> None:
        for name, *args in operations:
            if handle := getattr(Comm(), name)(*args):
                handle.wait()

    text = disagreement(world, lambda: call(most), lambda: call(rank_1))
    for word in words:
        assert word in text


@pytest.mark.slow
def test_a_message_of_another_shape_or_type_is_a_disagreement(world: World) -> None:
    def send_and_receive(sent: torch.Tensor, received: torch.Tensor) -> None:
        comm = Comm()
        if comm.rank == 0:
            comm.send(sent, 1, tag=5)
        elif comm.rank == 1:
            comm.recv(received, 0, tag=5)
        comm.barrier()

    for sent, received in [
        (torch.ones(4), torch.ones(8)),
        (torch.ones(8), torch.ones(4)),
        (torch.ones(4), torch.ones(4, dtype=torch.int32)),
    ]:
        text = failure(world, send_and_receive, sent, received, kind="disagree")
        assert "send(to 1)" in text and "recv(from 0)" in text and "0->1 tag 5" in text


def test_ranks_that_wait_in_different_groups_are_reported(world: World) -> None:
    def mix_groups() -> None:
        comm = Comm()
        half = comm.subgroup([0, 1])
        if comm.rank == 0:
            half.all_reduce(torch.ones(2))  # in the half
        else:
            comm.all_reduce(torch.ones(2))  # in the whole

    text = quick_failure(world, mix_groups, kind="stuck", ranks=(0, 1, 2, 3))
    assert "wait for each other forever" in text
    assert f"test_failures.py:{line_of('in the half')}" in text
    assert f"test_failures.py:{line_of('in the whole')}" in text
    assert "(ranks 0, 1)" in text and "group default" in text


def test_a_disagreement_that_a_function_survives_does_not_spoil_the_world(world: World) -> None:
    def survive() -> None:
        comm = Comm()
        pair = comm.subgroup([0, 1])
        if comm.rank == 0:
            pair.isend(torch.ones(4), 1)
        if comm.rank == 1:
            until(lambda: False, 0.5)
            raises("", pair.irecv, torch.ones(5), 0, error=CollectiveMismatch)

    world.run(survive)
    assert_works(world)


# ---- ranks that wait in vain


def test_a_rank_that_returns_early_is_named_at_once(world: World) -> None:
    def leave_early() -> None:
        if Comm().rank != 2:
            Comm().all_reduce(torch.ones(3, 5))  # nobody comes from 2

    text = quick_failure(world, leave_early, kind="stuck", ranks=(2,))
    assert text.startswith("rank 0 waits for rank 2, which returned without calling the operation.")
    assert "rank 2: has returned" in text
    where = f"test_failures.py:{line_of('nobody comes from 2')} in leave_early"
    assert "rank 0: waits in all_reduce(sum) float32 [3, 5], collective " in text
    assert text.count(where) == 3


def test_a_circle_of_ranks_is_reported_at_once(world: World) -> None:
    def circle() -> None:
        comm = Comm()
        comm.recv(torch.ones(2), (comm.rank + 1) % comm.size)
        comm.send(torch.ones(2), (comm.rank - 1) % comm.size)

    text = quick_failure(world, circle, kind="stuck", ranks=(0, 1, 2, 3))
    assert "ranks 0, 1, 2 and 3 wait for each other" in text
    assert "rank 3: waits in recv(from 0) float32 [2]" in text


def test_waiting_for_a_rank_outside_the_run_is_reported(world: World) -> None:
    words = ("rank 0 waits for rank 3, which is not in this run.", "rank 3: is not in this run")
    raises(words, world.run_on, [0, 1, 2], sum_of_ones, error=RankError)
    assert_works(world)


def nap_instead() -> None:
    time.sleep(600)  # the line of the nap


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 300])
def test_a_rank_that_never_arrives_is_named_with_its_line(hasty: World, depth: int) -> None:
    def sink(depth: int) -> None:
        if depth:
            sink(depth - 1)
        else:
            threading.Event().wait()  # the bottom

    def never_arrive() -> None:
        if Comm().rank == 1:
            sink(depth)
        Comm().barrier()

    text = failure(hasty, never_arrive, kind="stuck", ranks=(1,))
    assert "waited 2 s for rank 1, which never called the operation" in text
    line = f"test_failures.py:{line_of('the bottom')} in sink"
    assert f"rank 1: is in no Comm operation; it is at {line}" in text
    assert "rank 0: waits in barrier" in text and "rank 2: waits in barrier" in text


@pytest.mark.slow
def test_plain_torch_calls_that_hang_end_at_the_timeout(hasty: World) -> None:
    def never_arrive() -> None:
        if dist.get_rank() == 1:
            nap_instead()
        dist.all_reduce(torch.ones(2))  # plain

    text = failure(hasty, never_arrive, kind="stuck", ranks=())
    assert "Timed out" in text and f"line {line_of('plain')}, in never_arrive" in text
    assert "rank 1: is in no Comm operation; it is at test_failures.py:" in text
    assert "in nap_instead" in text, "it says where each rank is"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_without_the_board_a_hang_ends_at_the_timeout(transport: str) -> None:
    def never_arrive() -> None:
        if Comm().rank == 1:
            nap_instead()
        Comm().barrier()

    with World(2, timeout_s=1, check=False, transport=transport) as world:
        text = failure(world, never_arrive, kind="stuck")
        assert "barrier failed" in text and re.search("Timed out waiting 2(000m)? ?s", text)


@pytest.mark.slow
@on_each_rank("hasty")
def test_a_long_computation_and_an_error_that_was_caught_are_no_hang() -> None:
    sum_of_ones()
    raises("cannot move", Comm().all_reduce, torch.ones(2, device="meta"))
    time.sleep(3)  # longer than the timeout
    sum_of_ones()


@on_ranks_of_its_own(2, timeout_s=20, link=Link(gbps=0.003))
def test_a_slow_link_is_not_a_deadlock() -> None:
    Comm().all_reduce(x := torch.ones(100_000))
    assert x.eq(2).all()


@on_each_rank("world")
def test_ranks_far_apart_in_their_programs_are_not_a_deadlock() -> None:
    comm = Comm()
    for k in range(30):
        if comm.rank == k % comm.size:
            time.sleep(0.02)
        comm.broadcast(torch.ones(10), src=k % comm.size)
        if comm.rank == 0:
            comm.send(torch.ones(3), 3, tag=k)
        if comm.rank == 3:
            comm.recv(torch.ones(3), 0, tag=k)


@pytest.mark.slow
def test_a_stopped_rank_does_not_hold_the_driver(hasty: World) -> None:
    def stop_myself() -> None:
        if Comm().rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        Comm().barrier()

    failure(hasty, stop_myself, kind="stuck", ranks=(1,))


# ---- interrupts


def test_an_interrupt_stops_the_ranks_and_the_next_run_works(world: World) -> None:
    pids = world.run(os.getpid)
    before = signal.getsignal(signal.SIGINT)
    with soon():
        error = interrupted(lambda: world.run(time.sleep, 600), 0.5)
    assert isinstance(error, RankInterrupt) and isinstance(error, RankError)
    assert "interrupted; the 4 ranks were stopped" in str(error) and error.kind == "interrupted"
    assert gone(pids)
    assert signal.getsignal(signal.SIGINT) is before
    assert_works(world)


def test_a_users_own_handler_of_interrupts_is_left_in_its_place(world: World) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert world.run(time.sleep, 0.5) == [None] * 4
        assert heard == [1]
    finally:
        signal.signal(signal.SIGINT, before)


# ---- what cannot be pickled


def test_an_unpicklable_function_or_result_says_which_part_of_what(world: World) -> None:
    lock = threading.Lock()

    def uses_a_lock() -> None:
        lock.acquire()

    def result() -> dict:
        return {"fine": 1, "bad": [0, threading.Lock()]} if Comm().rank == 1 else {}

    for function, ranks, says in (
        (uses_a_lock, (), "variable 'lock' used in uses_a_lock cannot be pickled"),
        (result, (1,), "rank 1: the result['bad'][1] cannot be pickled"),
    ):
        text = failure(world, function, kind="unpicklable", ranks=ranks)
        assert says in text and "it is a lock" in text and "Create it inside the function" in text
    assert "generator" in failure(world, lambda: (k for k in range(3)))
    assert "ProcessGroup" in failure(world, lambda: [Comm().group])


def test_an_unpicklable_argument_says_which_part(world: World) -> None:
    deep = {"model": [1, {"lock": threading.Lock()}]}
    pids = world.run(os.getpid)
    words = r"^%s\['model'\]\[1\]\['lock'\] cannot be pickled.*it is a lock"
    raises(words % r"arguments \[1\]", world.run, print, 1, deep, error=RankError)
    raises(words % r"argument \['given'\]", world.run, dict, given=deep, error=RankError)
    assert world.run(os.getpid) == pids, "it does not cost the ranks their state"


def test_a_result_that_only_the_rank_can_read_says_so(world: World) -> None:
    def result() -> object:
        sys.modules["module_of_the_rank"] = module = ModuleType("module_of_the_rank")
        exec("class OfTheRank: pass", vars(module))
        return module.OfTheRank()

    words = "result of rank 0 arrived but cannot be unpickled here"
    raises(words, world.run, result, error=RuntimeError)
    assert_works(world)


def test_the_stop_of_a_world_does_not_wait_for_a_rank_that_hangs_in_its_farewell() -> None:
    def leave_a_busy_thread() -> int:
        def spin() -> None:
            while True:
                pass

        threading.Thread(target=spin, daemon=True).start()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return os.getpid()

    with soon():
        with World(2) as short_lived:
            pids = short_lived.run(leave_a_busy_thread)
        assert gone(pids)
