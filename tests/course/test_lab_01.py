"""Lab 01: labkit's errors for six classic bugs, the clinic on plain torch, the best placement."""

import ast
import os
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import pytest
import torch

from labkit.course import CheckFailed
from labkit.labs import FOLDERS
from labkit.labs.lab_01 import scenarios
from labkit.labs.lab_01.clinic import Clinic, Finding, clinic, run_on_labkit, run_on_torch
from labkit.runtime.plain import LauncherStore
from tables import cases, raises

LAB = FOLDERS["01"] / "lab.py"


def program(name: str) -> tuple[Callable[[Any], Any], int]:
    """A function of the notebook, and its first line."""
    tree = ast.parse(LAB.read_text())
    (found,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name)
    names: dict[str, Any] = {"__name__": "lab 01", "torch": torch}
    exec(compile(ast.Module([found], []), str(LAB), "exec"), names)
    return names[name], found.lineno


SAYS = {
    "skips": """
        rank 0 waits for rank 1, which returned without calling the operation
        Where each rank was:
        rank 0: waits in all_reduce(sum) float32 [8]
        1 of group default, at +3
        rank 1: has returned""",
    "other_order": """
        the ranks disagree about collective 1 of group default:
        rank 0: all_reduce(sum) float32 [8]  at +3
        rank 1: broadcast(src=0) float32 [8]  at +6""",
    "other_shape": """
        the ranks disagree about collective 1 of group default:
        rank 0: all_reduce(sum) float32 [4]  at +2
        rank 1: all_reduce(sum) float32 [8]  at +2""",
    "other_dtype": """
        the ranks disagree about collective 1 of group default:
        rank 0: all_reduce(sum) float32 [4]  at +2
        rank 1: all_reduce(sum) int32 [4]  at +2""",
    "sends_to_nobody": """
        rank 0 waits for rank 2, which returned without calling the operation
        Where each rank was:
        rank 0: waits in send(to 2) float32 [4]
        group default 0->2 tag 0, at +2
        rank 2: has returned""",
    "other_group": """
        ranks 0, 1 and 2 wait for each other forever
        Where each rank was:
        collective 1 of group 1 (ranks 0, 1), at +4
        rank 1: waits in all_reduce(sum) float32 [4]
        2 of group default, at +6""",
}


@pytest.mark.parametrize("name", SAYS)
def test_each_classic_is_named_with_rank_operation_and_line(name: str) -> None:
    play, first = program(name)
    text = run_on_labkit(play, 3)
    for line in SAYS[name].split("\n")[1:]:
        words, plus, lines = line.strip().partition("+")
        where = f"{LAB.name}:{first + int(lines)} in {name}" if plus else ""
        late = words.partition(": ")[0] + ": has not called it yet"  # on a loaded machine
        assert words + where in text or (late in text and "disagree" in text), text


def test_a_correct_program_raises_no_error():
    def correct(comm: Any) -> list[float]:
        x = torch.ones(2)
        comm.all_reduce(x)
        return x

    assert run_on_labkit(correct, 3) == ""
    assert run_on_torch(correct, 3) == ("silent", ["ranks 0, 1 and 2: returns [3.0, 3.0]"])


@pytest.mark.slow
def test_a_missing_collective_on_plain_torch_is_a_hang():
    outcome, messages = run_on_torch(program("skips")[0], 2)
    assert outcome == "hang"
    assert "Timed out" in messages[0] and messages[0].startswith("rank 0: ")
    assert messages[1].startswith("rank 1: returns [1.0")
    # A new group gets this timeout, too, not torch's default of half an hour.
    assert run_on_torch(program("other_group")[0], 3)[0] == "hang"


def test_another_dtype_passes_on_plain_torch_with_wrong_values():
    outcome, messages = run_on_torch(program("other_dtype")[0], 3)
    assert outcome == "silent"
    assert "[3.0, 3.0, 3.0, 3.0]" not in "".join(messages)


def test_a_rank_killed_on_plain_torch_is_reported_with_its_last_output():
    def dies(comm: Any) -> None:
        if comm.rank == 1:
            os.write(2, b"  what():  [enforce fail at /built/here/pair.cc:456] 8 vs 4.\n")
            os.abort()
        comm.barrier()

    outcome, messages = run_on_torch(dies, 2)
    assert outcome == "crash"
    assert messages == ["rank 1 was killed by SIGABRT", "[pair.cc:456] 8 vs 4."]


def test_an_error_on_plain_torch_is_a_crash():
    def fails(comm: Any) -> None:
        raise RuntimeError("no such device\nwith details")

    assert run_on_torch(fails, 2) == ("crash", ["ranks 0 and 1: RuntimeError: no such device"])


def test_ranks_inside_a_group_name_source_and_destination_on_plain_torch():
    def passes_on(comm: Any) -> float:
        x = torch.tensor([float(comm.rank)])
        pair = comm.subgroup([0, 2])
        assert (pair is None) == (comm.rank == 1)
        if comm.rank == 0:
            pair.send(x + 5, dst=1)
        if comm.rank == 2:
            pair.recv(x, src=0)
        if pair:
            pair.broadcast(x, src=1)
        return x

    messages = run_on_torch(passes_on, 3)[1]
    assert messages == ["ranks 0 and 2: returns [5.0]", "rank 1: returns [1.0]"]


def passes(comm: Any) -> None:
    comm.barrier()


def test_the_clinic_runs_each_and_compares_the_guesses(capsys: pytest.CaptureFixture[str]):
    found = clinic([passes, program("other_dtype")[0]], {"passes": "hang", "other_dtype": "silent"})
    assert found["passes"].verdict == "✗ silent (you: hang)"
    assert found["passes"].labkit_message == ""
    assert found["other_dtype"].verdict == "✓ silent"
    assert "rank 1: all_reduce(sum) int32 [4]" in found["other_dtype"].labkit_message
    assert "labkit: the ranks disagree" in repr(found)
    assert capsys.readouterr().out == "", "its worlds print nothing"


def test_a_guess_must_be_one_of_the_three():
    message = "your guess for passes is 'slow'"
    failed = raises(message, clinic, [passes], {"passes": "slow"}, error=CheckFailed)
    assert failed.expected == "hang or crash or silent"


@cases(
    ({}, "no guess yet for passes, waits"),
    ({"passes": "silent", "waits": ...}, "no guess yet for waits"),
    ({"passes": "silent", "waits": "hang", "deadlock": "hang"}, "no program is called 'deadlock'"),
)
def test_missing_and_unknown_guesses_are_refused(guesses: Any, message: str):
    def waits(comm: Any) -> None: ...

    raises(message, clinic, [passes, waits], guesses, error=CheckFailed)


def test_a_launchers_store_reads_the_addresses_that_gloo_writes():
    meeting = LauncherStore()
    key = "default_pg/0//cpu//0/0"
    meeting.store.set(key, bytes([2, 0, 0xA0, 0x3F, 127, 0, 0, 1, 0, 0]))
    assert meeting.addresses(1) == {key: f"127.0.0.1:{0xA03F}"}
    message = "1 of 2 ranks joined the store within 0.1 s"
    raises(message, meeting.addresses, 2, within_s=0.1, error=RuntimeError)


def test_a_table_escapes_html():
    html = Clinic([Finding("p", "hang", ["a < b"], "c & d")])._repr_html_()
    assert "a &lt; b" in html and "c &amp; d" in html and ">hang<" in html
    assert ">nothing<" in Clinic([Finding("p", "silent", [], "")])._repr_html_()


def test_the_best_known_placement_is_the_best_of_all():
    places = list(product(range(3), range(2), range(2)))
    sent = [(place, to, n) for place in places for to, n in scenarios.messages(place)]
    crossing_bytes = []
    for others in combinations(places[1:], 3):
        left = [place for place in places[1:] if place not in others]
        for more in combinations(left[1:], 3):
            node_of = dict.fromkeys(places, 2) | dict.fromkeys((places[0], *others), 0)
            node_of |= dict.fromkeys((left[0], *more), 1)
            crossing_bytes.append(sum(n for place, to, n in sent if node_of[place] != node_of[to]))
    assert len(crossing_bytes) == 5_775
    assert min(crossing_bytes) == scenarios.BEST
