"""Every way in which a run can fail, provoked for real: each ends in one `RankError` that says
which rank, where and why, and in a world whose next run works."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import labkit
from labkit import CollectiveMismatch, Comm, CommError, Link, RankError, RankInterrupt, World
from provoke import alive, driver, gone, servers, until
from worlds import world_fixture

PATIENCE_S = 10.0  # "within 2 s" on a machine that has other things to do


world = world_fixture(4, timeout_s=60)


hasty = world_fixture(3, timeout_s=2)


def failure(world: World, fn: Callable[..., Any], *args: Any, **how: Any) -> RankError:
    """The error of a run, after which the world must work as if nothing had been."""
    with pytest.raises(RankError) as info:
        world.run(fn, *args, **how)
    assert_works(world)
    return info.value


def assert_works(world: World) -> None:
    assert world.run(sum_of_ones) == [world.size] * world.size


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
    with soon():
        error = failure(world, lambda: fail_deep_inside(2))
    text = str(error)
    assert error.kind == "raised" and error.ranks == (2,)
    assert text.startswith("rank 2 raised KeyError: 'the key of the test'")
    assert "Traceback (most recent call last)" in text
    assert 'raise KeyError("the key of the test")' in text
    assert f"line {line_of('the cause')}, in fail_deep_inside" in text
    assert "ranks 0, 1 and 3 stopped" in text
    assert "labkit/runtime" not in text, "the rank's own loop is of no interest"


def test_the_same_exception_on_all_ranks_is_reported_once(world: World) -> None:
    def fail() -> None:
        raise ValueError("everywhere")

    error = failure(world, fail)
    assert error.ranks
    assert str(error).count("Traceback") == 1 and " raised ValueError: everywhere" in str(error)


def test_different_exceptions_are_each_reported(world: World) -> None:
    def fail() -> None:
        raise ValueError(f"of {Comm().rank % 2}")

    error = failure(world, fail)
    assert error.ranks == (0, 1, 2, 3)
    assert "ranks 0 and 2 raised ValueError: of 0" in str(error)
    assert "ranks 1 and 3 raised ValueError: of 1" in str(error)


def test_an_exception_of_a_cell_shows_the_line_of_the_cell(world: World) -> None:
    source = "def f(x):\n    return 1 // x\n\nf(rank - 1)"
    with pytest.raises(RankError) as info:
        world.run_cell(source, "<cell of the test>")
    text = str(info.value)
    assert info.value.ranks == (1,)
    assert "ZeroDivisionError" in text
    assert "return 1 // x" in text and "f(rank - 1)" in text
    assert 'File "<cell of the test>", line 2, in f' in text
    assert_works(world)


def test_a_syntax_error_in_a_cell_names_its_line(world: World) -> None:
    world.run_cell("kept = 1", "<cell of the test>")
    with pytest.raises(SyntaxError) as info:
        world.run_cell("x = 1\nfor x in\n", "<cell of the test>")
    assert (info.value.lineno, info.value.text) == (2, "for x in\n")
    with pytest.raises(SyntaxError) as info:
        world.run_cell("!ls", "<cell of the test>")
    assert "do not work there" in info.value.__notes__[0]
    assert world.run_cell("kept", "<cell of the test>") == [1] * world.size, "the ranks live on"


def test_causes_contexts_notes_and_groups_are_told(world: World) -> None:
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

    text = str(failure(world, chained))
    assert text.index("ZeroDivisionError") < text.index("directly caused") < text.rindex("outer")
    assert "note of the test" in text
    assert "was being handled during" in str(failure(world, during))
    text = str(failure(world, grouped))
    assert "KeyError: 'one of them'" in text and "OSError: the other" in text


class Unpleasant(Exception):
    """Cannot be pickled, and has no text."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise SystemExit("no text")

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


class TextOfItsOwn(Exception):
    def __str__(self) -> str:
        class Text(str):
            __slots__ = ()

        return Text("its own text")


def test_exceptions_that_cannot_be_pickled_are_reported(world: World) -> None:
    def unpleasant() -> None:
        raise Unpleasant

    def own_text() -> None:
        raise TextOfItsOwn

    def circle() -> None:
        one, other = ValueError("one"), ValueError("other")
        one.__cause__, other.__cause__ = other, one
        raise one

    assert "raised Unpleasant: (its message cannot be shown" in str(failure(world, unpleasant))
    assert "raised TextOfItsOwn: its own text" in str(failure(world, own_text))
    assert str(failure(world, circle)).count("ValueError: other") == 1


def test_a_very_long_story_is_cut_to_what_a_person_reads(world: World) -> None:
    def one(depth: int) -> None:
        other(depth)

    def other(depth: int) -> None:
        one(depth + 1)

    def verbose() -> None:
        raise ValueError("begin" + "x" * 10_000_000 + "end")

    text = str(failure(world, one, 0))
    assert "RecursionError" in text and "calls left out" in text and len(text) < 50_000
    text = str(failure(world, verbose))
    assert "begin" in text and "end" in text and "left out" in text and len(text) < 50_000


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_an_exit_raised_by_a_function_is_an_exception_like_others(world: World, name: str) -> None:
    error = failure(world, lambda: exec(f"raise {name}(3)"))
    assert error.kind == "raised" and f"raised {name}: 3" in str(error)
    assert not isinstance(error, KeyboardInterrupt)


def test_ranks_that_only_suffered_are_not_blamed(world: World) -> None:
    def fail() -> None:
        if Comm().rank == 3:
            raise ValueError("the cause")
        try:
            sum_of_ones()
        finally:
            time.sleep(0)

    error = failure(world, fail)
    assert error.ranks == (3,) and "CommError" not in str(error)


def test_what_is_printed_before_a_failure_is_seen(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        if Comm().rank == 0:
            print("the last words", flush=False)
            raise ValueError
        while True:
            print("a rank goes on printing while another fails")

    failure(world, fail)
    assert "[rank 0] the last words" in capsys.readouterr().out


def test_an_error_in_a_notebook_is_the_ranks_story_only(world: World) -> None:
    error = failure(world, lambda: fail_deep_inside(1))
    (shown,) = error._render_traceback_()
    assert shown.startswith("RankError: rank 1 raised KeyError")
    assert "world.py" not in shown


def test_an_error_can_be_pickled_and_keeps_what_it_says() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(RankError("text", "died", (2,))))
    assert (str(error), error.kind, error.ranks) == ("text", "died", (2,))
    assert isinstance(pickle.loads(pickle.dumps(RankInterrupt("text"))), RankInterrupt)


# ---- deaths


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT"])
def test_a_killed_rank_is_named_with_its_signal(world: World, name: str) -> None:
    number = int(getattr(signal, name))

    def die() -> None:
        if Comm().rank == 1:
            os.kill(os.getpid(), number)
        sum_of_ones()

    with soon():
        error = failure(world, die)
    assert error.kind == "died" and error.ranks == (1,)
    assert f"rank 1 was killed by {name}" in str(error)
    assert "ranks 0, 2 and 3 stopped" in str(error)


def test_a_signal_without_a_name_has_its_number(world: World) -> None:
    error = failure(world, lambda: os.kill(os.getpid(), signal.SIGRTMIN + 5))
    assert f"killed by signal {signal.SIGRTMIN + 5}" in str(error)


def test_a_crash_in_c_shows_the_line_of_python(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash() -> None:
        import ctypes

        ctypes.string_at(0)

    assert "SIGSEGV" in str(failure(world, crash))
    out = capsys.readouterr().out
    assert "Segmentation fault" in out and "in crash" in out


def test_a_rank_killed_from_outside_while_it_computes_is_named(world: World) -> None:
    victim = world.run(os.getpid)[2]

    def compute() -> None:
        until(lambda: False, 600)

    killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    killer.start()
    with soon():
        error = failure(world, compute)
    assert error.ranks == (2,) and "SIGKILL" in str(error)


def test_a_rank_that_died_between_runs_is_named_by_the_next(world: World) -> None:
    os.kill(victim := world.run(os.getpid)[3], signal.SIGKILL)
    assert gone([victim])
    with soon():
        error = failure(world, sum_of_ones)
    assert error.kind == "died" and error.ranks == (3,)


def test_all_ranks_killed_at_once_are_all_named(world: World) -> None:
    error = failure(world, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert error.kind == "died" and "rank 0 was killed" in str(error)


@pytest.mark.parametrize("status", [7, 0])
def test_a_rank_that_exits_is_named_with_its_status(world: World, status: int) -> None:
    def leave() -> None:
        if Comm().rank == 2:
            os._exit(status)
        sum_of_ones()

    with soon():
        error = failure(world, leave)
    assert error.kind == "died" and error.ranks == (2,)
    assert f"rank 2 ended by itself with status {status}" in str(error)


def test_a_rank_that_closes_its_connection_is_named(world: World) -> None:
    def cut() -> None:
        if Comm().rank == 1:
            labkit.attach().control.close()
            time.sleep(600)

    with soon():
        error = failure(world, cut)
    assert error.kind == "died" and error.ranks == (1,)
    assert "rank 1 closed the connection" in str(error)


@pytest.mark.slow
def test_spawned_ranks_that_die_are_named_as_well() -> None:
    with World(2, start="spawn") as world:
        error = failure(world, lambda: os.kill(os.getpid(), 9) if Comm().rank else sum_of_ones())
        assert error.ranks == (1,) and "SIGKILL" in str(error)


def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A cgroup whose processes are killed above `limit_bytes`; skips where none can be made."""
    first = Path("/sys/fs/cgroup/memory")
    name = f"labkit-test-{os.getpid()}"
    if (first / "memory.limit_in_bytes").exists():
        group, setting, swap = first / name, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    else:
        mine = Path("/proc/self/cgroup").read_text().partition("0::")[2].strip().lstrip("/")
        group = Path("/sys/fs/cgroup") / mine / name
        setting, swap = "memory.max", "memory.swap.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (group / setting).write_text(str(limit_bytes))
        except OSError as error:  # version 2 wants the controller switched on above
            pytest.skip(f"the memory of a cgroup cannot be limited here: {error}")
        if (group / swap).exists():
            (group / swap).write_text("0" if setting == "memory.max" else str(limit_bytes))
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.fixture
def tight_memory() -> Iterator[Path]:
    if sys.platform != "linux":
        pytest.skip("memory cgroups are Linux's")
    yield from memory_limit(1_000_000_000)


@pytest.mark.slow
def test_a_rank_killed_out_of_memory_is_named_with_the_reason(
    tight_memory: Path, tmp_path: Path
) -> None:
    script = f"""
    with open({str(tight_memory / "cgroup.procs")!r}, "w") as file:
        file.write(str(os.getpid()))

    def eat():
        if Comm().rank == 1:
            food = []
            while True:
                food.append(torch.ones(10_000_000))
        Comm().barrier()

    with World(2) as world:
        try:
            world.run(eat)
        except RankError as error:
            say(error.kind, error.ranks, str(error).replace("\\n", " "))
        say(world.run(lambda: Comm().rank))
    """
    with driver(script, tmp_path) as running:
        said = running.hear()
        assert said.startswith("died (1,) rank 1 was killed by SIGKILL; it had used up to ")
        assert "The system ran out of memory and killed it: use fewer ranks" in said
        assert running.hear() == "[0, 1]"
        assert running.rest() == "" and running.process.returncode == 0


# ---- ranks that disagree


def disagreement(world: World, one: Callable[[], Any], other: Callable[[], Any]) -> str:
    """What is said when rank 1 does `other` and the rest do `one`: at once, with each rank."""

    def differ() -> None:
        (other if Comm().rank == 1 else one)()

    with soon():
        error = failure(world, differ)
    assert error.kind == "disagree", error
    text = str(error)
    assert "the ranks disagree about" in text
    for rank in (0, 1):
        assert f"rank {rank}:" in text
    assert "test_failures.py:" in text
    return text


def test_another_operation_is_reported_with_both_source_lines(world: World) -> None:
    text = disagreement(
        world,
        lambda: Comm().all_reduce(torch.ones(4)),  # the one operation
        lambda: Comm().broadcast(torch.ones(4)),  # the other operation
    )
    assert (
        f"all_reduce(sum) float32 [4]  at test_failures.py:{line_of('the one operation')}" in text
    )
    assert (
        f"broadcast(src=0) float32 [4]  at test_failures.py:{line_of('the other operation')}"
        in text
    )
    assert "collective" in text and "group default" in text


@pytest.mark.parametrize(
    "one, other, words",
    [
        (
            lambda c: c.all_reduce(torch.ones(4)),
            lambda c: c.all_reduce(torch.ones(5)),
            ["[4]", "[5]"],
        ),
        (
            lambda c: c.all_reduce(torch.ones(4)),
            lambda c: c.all_reduce(torch.ones(4, dtype=torch.float64)),
            ["float32", "float64"],
        ),
        (
            lambda c: c.all_reduce(torch.ones(2, 3)),
            lambda c: c.all_reduce(torch.ones(3, 2)),
            ["[2, 3]", "[3, 2]"],
        ),
        (
            lambda c: c.all_reduce(torch.ones(4), "sum"),
            lambda c: c.all_reduce(torch.ones(4), "max"),
            ["all_reduce(sum)", "all_reduce(max)"],
        ),
        (
            lambda c: c.broadcast(torch.ones(4), src=0),
            lambda c: c.broadcast(torch.ones(4), src=1),
            ["src=0", "src=1"],
        ),
        (lambda c: c.barrier(), lambda c: c.all_reduce(torch.ones(4)), ["barrier", "all_reduce"]),
        (
            lambda c: c.all_reduce(torch.ones(4), async_op=True).wait(),
            lambda c: c.all_reduce(torch.ones(5), async_op=True).wait(),
            ["[4]", "[5]"],
        ),
    ],
    ids=["shape", "dtype", "same number of elements", "reduction", "root", "barrier", "async"],
)
def test_disagreement_is_reported_at_once(
    world: World, one: Callable, other: Callable, words: list[str]
) -> None:
    text = disagreement(world, lambda: one(Comm()), lambda: other(Comm()))
    for word in words:
        assert word in text


def test_one_call_too_many_is_a_disagreement_about_the_next(world: World) -> None:
    text = disagreement(
        world,
        lambda: (sum_of_ones(), Comm().barrier()),
        lambda: (sum_of_ones(), sum_of_ones(), Comm().barrier()),
    )
    assert "barrier" in text and "all_reduce" in text


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
        error = failure(world, send_and_receive, sent, received)
        assert error.kind == "disagree"
        assert "send(to 1)" in str(error) and "recv(from 0)" in str(error)
        assert "0->1 tag 5" in str(error)


def test_ranks_that_wait_in_different_groups_are_reported(world: World) -> None:
    def mix_groups() -> None:
        comm = Comm()
        half = comm.subgroup([0, 1])
        if comm.rank == 0:
            half.all_reduce(torch.ones(2))  # in the half
        else:
            comm.all_reduce(torch.ones(2))  # in the whole

    with soon():
        error = failure(world, mix_groups)
    text = str(error)
    assert error.kind == "stuck" and error.ranks == (0, 1, 2, 3)
    assert "wait for each other: none can go on" in text
    assert f"test_failures.py:{line_of('in the half')}" in text
    assert f"test_failures.py:{line_of('in the whole')}" in text
    assert "(ranks 0, 1)" in text and "group default" in text


def test_a_disagreement_that_a_function_survives_does_not_spoil_the_world(world: World) -> None:
    def survive() -> bool:
        comm = Comm()
        pair = comm.subgroup([0, 1])
        if comm.rank == 0:
            pair.isend(torch.ones(4), 1)
        if comm.rank == 1:
            with pytest.raises(CollectiveMismatch):
                until(lambda: False, 0.5)
                pair.irecv(torch.ones(5), 0)
        return True

    assert world.run(survive) == [True] * 4
    assert_works(world)


# ---- ranks that wait in vain


def test_a_rank_that_returns_early_is_named_at_once(world: World) -> None:
    def leave_early() -> None:
        if Comm().rank != 2:
            Comm().all_reduce(torch.ones(3, 5))  # nobody comes from 2

    with soon():
        error = failure(world, leave_early)
    text = str(error)
    assert error.kind == "stuck" and error.ranks == (2,)
    assert text.startswith("rank 2 returned without calling what rank 0 waits for.")
    assert "rank 2: has returned" in text
    where = f"test_failures.py:{line_of('nobody comes from 2')} in leave_early"
    assert "rank 0: waits in all_reduce(sum) float32 [3, 5], collective " in text
    assert text.count(where) == 3


def test_a_circle_of_ranks_is_reported_at_once(world: World) -> None:
    def circle() -> None:
        comm = Comm()
        comm.recv(torch.ones(2), (comm.rank + 1) % comm.size)
        comm.send(torch.ones(2), (comm.rank - 1) % comm.size)

    with soon():
        error = failure(world, circle)
    assert error.kind == "stuck" and error.ranks == (0, 1, 2, 3)
    assert "ranks 0, 1, 2 and 3 wait for each other" in str(error)
    assert "rank 3: waits in recv(from 0) float32 [2]" in str(error)


def test_waiting_for_a_rank_outside_the_run_is_reported(world: World) -> None:
    with pytest.raises(RankError, match="rank 3 is not in this run, and rank 0 waits") as info:
        world.run_on([0, 1, 2], sum_of_ones)
    assert "rank 3: is not in this run" in str(info.value)
    assert_works(world)


def nap_instead() -> None:
    time.sleep(600)  # the line of the nap


@pytest.mark.slow
def test_a_rank_that_never_arrives_is_named_with_its_line(hasty: World) -> None:
    def never_arrive() -> None:
        if Comm().rank == 1:
            nap_instead()
        Comm().barrier()

    error = failure(hasty, never_arrive)
    text = str(error)
    assert error.kind == "stuck" and error.ranks == (1,)
    assert "waited 2 s for rank 1, who never came to it" in text
    line = line_of("the line of the nap")
    assert f"rank 1: is in no operation of a Comm; it is at test_failures.py:{line}" in text
    assert "in nap_instead" in text
    assert "rank 0: waits in barrier" in text and "rank 2: waits in barrier" in text


@pytest.mark.slow
def test_a_rank_deep_in_a_recursion_or_a_library_is_found_too(hasty: World) -> None:
    def sink(depth: int) -> None:
        if depth:
            sink(depth - 1)
        else:
            threading.Event().wait()  # the bottom

    def never_arrive(depth: int) -> None:
        if Comm().rank == 1:
            sink(depth)
        Comm().barrier()

    for depth in (3, 300):
        text = str(failure(hasty, never_arrive, depth))
        assert f"test_failures.py:{line_of('the bottom')} in sink" in text


@pytest.mark.slow
def test_plain_torch_calls_that_hang_end_at_the_timeout(hasty: World) -> None:
    def never_arrive() -> None:
        if dist.get_rank() == 1:
            nap_instead()
        dist.all_reduce(torch.ones(2))  # plain

    error = failure(hasty, never_arrive)
    text = str(error)
    assert error.kind == "stuck" and error.ranks == ()
    assert "Timed out" in text and f"line {line_of('plain')}, in never_arrive" in text
    assert "rank 1: is in no operation of a Comm; it is at test_failures.py:" in text
    assert "in nap_instead" in text, "it says who stands where"


@pytest.mark.slow
def test_without_the_board_a_hang_ends_at_the_timeout() -> None:
    def never_arrive() -> None:
        if Comm().rank == 1:
            nap_instead()
        Comm().barrier()

    with World(2, timeout_s=1, check=False) as world:
        error = failure(world, never_arrive)
        assert error.kind == "stuck" and "barrier failed" in str(error)


@pytest.mark.slow
def test_a_long_computation_without_communication_is_not_a_hang(hasty: World) -> None:
    def compute() -> int:
        sum_of_ones()
        time.sleep(4)
        sum_of_ones()
        return 1

    assert hasty.run(compute) == [1] * 3


def test_a_slow_link_is_not_a_deadlock() -> None:
    def slow() -> float:
        x = torch.ones(100_000)
        Comm().all_reduce(x)
        return x[0].item()

    with World(2, timeout_s=20, link=Link(gbps=0.003)) as world:
        assert world.run(slow) == [2.0, 2.0]


def test_ranks_far_apart_in_their_programs_are_not_a_deadlock(world: World) -> None:
    def staggered() -> int:
        comm = Comm()
        for k in range(30):
            if comm.rank == k % comm.size:
                time.sleep(0.02)
            comm.broadcast(torch.ones(10), src=k % comm.size)
            if comm.rank == 0:
                comm.send(torch.ones(3), 3, tag=k)
            if comm.rank == 3:
                comm.recv(torch.ones(3), 0, tag=k)
        return 1

    assert world.run(staggered) == [1] * 4


@pytest.mark.slow
def test_an_operation_that_failed_and_was_caught_is_not_waited_for(hasty: World) -> None:
    def survive() -> str:
        comm = Comm()
        with pytest.raises(ValueError, match="cannot move"):
            comm.all_reduce(torch.ones(2, device="meta"))
        time.sleep(3)  # longer than the timeout
        return "survived"

    assert hasty.run(survive) == ["survived"] * 3
    assert_works(hasty)


def test_a_peer_that_died_is_blamed_though_others_turn_their_errors_into_others(
    world: World,
) -> None:
    def fail() -> None:
        if Comm().rank == 0:
            os._exit(3)
        try:
            sum_of_ones()
        except CommError:
            raise ValueError("the step failed") from None

    error = failure(world, fail)
    assert error.kind == "died" and error.ranks == (0,)


# ---- interrupts


def interrupt_soon(*after_s: float) -> None:
    for delay_s in after_s:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)).start()


def hang_and_tell(folder: Path) -> None:
    (folder / f"began{Comm().rank}").touch()
    time.sleep(600)


def test_an_interrupt_stops_the_ranks_and_the_next_run_works(world: World) -> None:
    pids = world.run(os.getpid)
    before = signal.getsignal(signal.SIGINT)
    interrupt_soon(0.5)
    with (
        soon(),
        pytest.raises(RankInterrupt, match="interrupted; the 4 ranks were stopped") as info,
    ):
        world.run(time.sleep, 600)
    assert isinstance(info.value, KeyboardInterrupt) and isinstance(info.value, RankError)
    assert info.value.kind == "interrupted"
    assert gone(pids)
    assert signal.getsignal(signal.SIGINT) is before
    assert_works(world)


INTERRUPTED = """
def interrupted(action, *delays_s):
    'Runs `action` under a hail of interrupts; returns what it raised first.'
    raised = None
    timers = [threading.Timer(s, os.kill, (os.getpid(), signal.SIGINT)) for s in delays_s]
    try:
        for timer in timers:
            timer.start()
        action()
    except KeyboardInterrupt as error:
        raised = error
    until_s = time.monotonic() + max(delays_s)  # one that `start` was interrupted in comes, too
    while True:
        try:
            while time.monotonic() < until_s or any(timer.is_alive() for timer in timers):
                time.sleep(0.005)
            time.sleep(0.02)
            return raised
        except KeyboardInterrupt:
            pass

def ones():
    x = torch.ones(1)
    Comm().all_reduce(x)
    return x.item()
"""


@pytest.mark.slow
def test_impatient_interrupts_leave_nothing_behind_either(tmp_path: Path) -> None:
    script = (
        INTERRUPTED
        + """
with World(2) as world:
    for k in range(6):
        pids = world.run(os.getpid)
        hail = [0.3 + 0.002 * k * j for j in range(8)]
        raised = interrupted(lambda: world.run(time.sleep, 600), *hail)
        say(type(raised).__name__ in ("RankInterrupt", "KeyboardInterrupt"), world.run(ones))
        say(*pids)
"""
    )
    with driver(script, tmp_path) as running:
        for _ in range(6):
            assert running.hear() == "True [2.0, 2.0]"
            assert gone(running.hear_pids())
            assert len(running.leftovers()) == 1
        assert running.rest() == "" and not running.leftovers()


@pytest.mark.slow
def test_an_interrupt_at_any_moment_of_a_birth_or_a_run_leaves_what_works(tmp_path: Path) -> None:
    script = (
        INTERRUPTED
        + """
World(1).close()
def live():
    global world
    world = World(2)
    while True:
        world.run(ones)
for k in range(40):
    world = None
    raised = interrupted(live, 0.003 * k, *[0.003 * k + 0.001] * (k % 2))
    say(isinstance(raised, KeyboardInterrupt), world is None or world.run(ones) == [2, 2])
    if world is not None:
        world.close()
    del raised
    say(len(os.listdir(os.environ["TMPDIR"])))
with World(2) as world:
    say(world.run(ones))
"""
    )
    with driver(script, tmp_path) as running:
        for _ in range(40):
            assert running.hear() == "True True"
            assert running.hear() == "0"
        assert running.hear() == "[2.0, 2.0]"
        (server,) = servers(psutil.Process(running.process.pid))
        assert running.rest() == "" and gone([server.pid])


def test_a_users_own_handler_of_interrupts_is_left_in_its_place(world: World) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        interrupt_soon(0.2)
        assert world.run(time.sleep, 0.5) == [None] * 4
        assert heard == [1]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_an_interrupt_of_the_whole_terminal_is_answered_by_the_driver_alone(
    tmp_path: Path,
) -> None:
    script = """
    with World(2) as world:
        say(*world.run(os.getpid))
        try:
            def hang():
                print("SAID hanging", flush=True)
                time.sleep(600)
            world.run(hang)
        except KeyboardInterrupt as error:
            say(type(error).__name__, world.run(lambda: Comm().rank))
    """
    with driver(script, tmp_path) as running:
        pids = running.hear_pids()
        until(lambda: False, 0.5)
        running.interrupt()
        assert running.hear() == "RankInterrupt [0, 1]"
        assert running.rest() == "" and running.process.returncode == 0
        assert gone(pids) and not running.leftovers()


@pytest.mark.slow
def test_a_run_in_a_thread_is_not_disturbed_by_an_interrupt_of_the_main_thread(
    tmp_path: Path,
) -> None:
    script = (
        INTERRUPTED
        + """
results = []
with World(2) as world:
    thread = threading.Thread(target=lambda: results.append(world.run(time.sleep, 1)))
    thread.start()
    say(type(interrupted(lambda: time.sleep(600), 0.3)).__name__)
    thread.join()
    say(results)
"""
    )
    with driver(script, tmp_path) as running:
        assert running.hear() == "KeyboardInterrupt"
        assert running.hear() == "[[None, None]]"


# ---- what cannot travel


def test_an_unpicklable_function_says_which_variable(world: World) -> None:
    lock = threading.Lock()

    def uses_a_lock() -> None:
        lock.acquire()

    error = failure(world, uses_a_lock)
    assert error.kind == "unpicklable"
    assert "variable 'lock' used in uses_a_lock cannot travel" in str(error)
    assert "Make it inside the function" in str(error)


def test_an_unpicklable_argument_says_which_part(world: World) -> None:
    deep = {"model": [1, {"lock": threading.Lock()}]}
    for call, name in (
        (lambda: world.run(print, 1, deep), "arguments [1]"),
        (lambda: world.run(lambda given: given, given=deep), "argument ['given']"),
    ):
        with pytest.raises(RankError, match="cannot travel.*it is a lock") as info:
            call()
        assert str(info.value).startswith(f"{name}['model'][1]['lock'] cannot travel")


def test_an_argument_that_cannot_travel_does_not_cost_the_ranks_their_state(world: World) -> None:
    pids = world.run(os.getpid)
    with pytest.raises(RankError, match="cannot travel"):
        world.run(print, threading.Lock())
    assert world.run(os.getpid) == pids


def test_an_unpicklable_result_says_which_part_and_of_which_rank(world: World) -> None:
    def result() -> dict:
        return {"fine": 1, "bad": [0, threading.Lock()]} if Comm().rank == 1 else {}

    error = failure(world, result)
    assert error.kind == "unpicklable" and error.ranks == (1,)
    assert "rank 1: the result['bad'][1] cannot travel" in str(error) and "lock" in str(error)


def test_a_result_that_only_the_rank_can_read_says_so(world: World) -> None:
    def result() -> object:
        import types

        module = types.ModuleType("module_of_the_rank")
        sys.modules["module_of_the_rank"] = module
        exec("class Thing: pass", module.__dict__)
        return module.Thing()  # type: ignore[attr-defined]

    with pytest.raises(RuntimeError, match="result of rank 0 arrived but cannot be read here"):
        world.run(result)
    assert_works(world)


def test_a_generator_and_a_process_group_are_named_as_what_they_are(world: World) -> None:
    assert "generator" in str(failure(world, lambda: (k for k in range(3))))
    assert "ProcessGroup" in str(failure(world, lambda: [Comm().group]))


# ---- the end of the driver, of the server


@pytest.mark.slow
def test_a_killed_driver_leaves_no_rank_and_no_folder(tmp_path: Path) -> None:
    script = """
    world = World(3)
    def start():
        import subprocess
        return os.getpid(), subprocess.Popen(["sleep", "600"]).pid
    say(*[pid for pids in world.run(start) for pid in pids])
    def work():
        print("SAID busy", flush=True)
        while True:
            Comm().barrier()
    world.run(work)
    """
    with driver(script, tmp_path) as running:
        pids = running.hear_pids()
        assert len(pids) == 6 and all(map(alive, pids))
        pids += [process.pid for process in servers(psutil.Process(running.process.pid))]
        assert running.leftovers()
        until(lambda: False, 0.5)
        running.process.kill()
        assert gone(pids)
        assert until(lambda: not running.leftovers())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "kill"), [("fork", os.killpg), ("spawn", os.kill)], ids=["whole group", "spawned"]
)
def test_a_killed_driver_leaves_nothing_either(tmp_path: Path, start: str, kill: Any) -> None:
    script = f"""
    world = World(2, start={start!r})
    say(*world.run(os.getpid))
    world.run(time.sleep, 600)
    """
    with driver(script, tmp_path) as running:
        pids = running.hear_pids()
        kill(running.process.pid, signal.SIGKILL)
        assert gone(pids)
        assert until(lambda: not running.leftovers())


@pytest.mark.slow
def test_a_driver_killed_while_it_starts_a_world_leaves_nothing(tmp_path: Path) -> None:
    script = """
    World(1).close()
    say(sys.argv[0])
    while True:
        World(3).close()
    """
    with driver(script, tmp_path) as running:
        running.hear()
        until(lambda: False, 0.73)
        family = psutil.Process(running.process.pid).children(recursive=True)
        running.process.kill()
        assert gone([process.pid for process in family])
        assert until(lambda: not running.leftovers())


@pytest.mark.slow
def test_a_driver_that_ends_by_an_exception_leaves_nothing(tmp_path: Path) -> None:
    script = """
    with World(2) as world:
        say(*world.run(os.getpid))
        raise ValueError("of the script")
    """
    with driver(script, tmp_path) as running:
        pids = running.hear_pids()
        assert "ValueError: of the script" in running.rest()
        assert running.process.returncode == 1
        assert gone(pids) and not running.leftovers()


@pytest.mark.slow
def test_a_killed_server_takes_its_ranks_with_it_and_a_new_one_comes(tmp_path: Path) -> None:
    script = """
    import psutil
    with World(2) as world, World(2) as idle:
        for kill in range(2):
            pids = [*world.run(os.getpid), *idle.run(os.getpid)]
            (server,) = psutil.Process().children()
            threading.Timer(0.3, server.kill).start()
            try:
                world.run(time.sleep, 600)
            except RankError as error:
                say(error.kind, "server" in str(error))
            say(world.run(lambda: Comm().rank))
            try:
                idle.run(lambda: 1)
            except RankError as error:
                say(error.kind)
            say(idle.run(lambda: Comm().rank), *[psutil.pid_exists(pid) for pid in pids])
    """
    with driver(script, tmp_path) as running:
        for _ in range(2):
            assert running.hear() == "died True"
            assert running.hear() == "[0, 1]"
            assert running.hear() == "died"
            assert running.hear() == "[0, 1] False False False False"
        assert running.rest() == "" and not running.leftovers()


@pytest.mark.slow
def test_a_server_or_a_rank_that_cannot_start_says_so(tmp_path: Path) -> None:
    script = """
    sys.executable = "/bin/false"
    try:
        World(2)
    except RuntimeError as error:
        say(error)
    try:
        World(2, start="spawn")
    except RankError as error:
        say(error)
    """
    with driver(script, tmp_path) as running:
        assert "the server that ranks are forked from ended with status 1" in running.hear()
        assert "rank 0 ended by itself with status 1" in running.hear()
        assert running.rest() == "" and not running.leftovers()


@pytest.mark.slow
def test_processes_that_the_system_refuses_are_reported(tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/pids/labkit-test-{os.getpid()}")
    if not group.parent.exists():
        pytest.skip("needs a pids cgroup")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no pids cgroup can be made here: {error}")
    script = f"""
    import subprocess, psutil
    World(1).close()
    (server,) = psutil.Process().children()
    with open({str(group / "cgroup.procs")!r}, "w") as file:
        file.write(str(server.pid))
    with open({str(group / "pids.max")!r}, "w") as file:
        file.write("3")
    try:
        World(6)
    except RuntimeError as error:
        say(error)
    with open({str(group / "pids.max")!r}, "w") as file:
        file.write("max")
    with World(6) as world:
        say(world.run(lambda: Comm().rank))
    """
    try:
        with driver(script, tmp_path) as running:
            assert "the system did not start 6 processes" in running.hear()
            assert running.hear() == "[0, 1, 2, 3, 4, 5]"
            assert running.rest() == "" and not running.leftovers()
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_the_stop_of_a_world_does_not_wait_for_a_rank_that_hangs_in_its_farewell(
    world: World,
) -> None:
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


@pytest.mark.slow
def test_a_stopped_rank_does_not_hold_the_driver(world: World) -> None:
    def stop_myself() -> None:
        if Comm().rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        Comm().barrier()

    with World(2, timeout_s=1) as short:
        error = failure(short, stop_myself)
        assert error.kind == "stuck" and error.ranks == (1,)


@pytest.mark.slow
def test_a_subprocess_of_the_driver_does_not_keep_ranks_alive(tmp_path: Path) -> None:
    script = """
    import subprocess
    world = World(2)
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    say(*world.run(os.getpid), child.pid)
    time.sleep(600)
    """
    with driver(script, tmp_path) as running:
        *pids, child = running.hear_pids()
        try:
            running.process.kill()
            assert gone(pids) and alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
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
