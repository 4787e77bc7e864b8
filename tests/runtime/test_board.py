"""The board on which ranks compare notes: the ranks are played by one process."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labkit import World
from labkit.runtime import board as states
from labkit.runtime.board import (
    MARKS,
    MAX_RANKS,
    SLOTS,
    WAITED_FOR,
    Board,
    CollectiveMismatch,
    Note,
)
from tables import raises


def note(seq: int, what: str = "all_reduce(sum) float32 [4]", group: str = "default") -> Note:
    return Note(group, (0, 1, 2), seq, what, "lesson.py:3 in train", compares=what)


def refused(board: Board, different: Note, words: str | tuple[str, ...] = "") -> None:
    raises(words, board.enter, different, error=CollectiveMismatch)


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[list[Board]]:
    """The board as each of three ranks sees it."""
    driver = Board.create(tmp_path / "board", 3)
    boards = [Board(tmp_path / "board", 3, rank) for rank in range(3)]
    yield boards
    for board in (driver, *boards):
        board.close()


def test_ranks_that_agree_say_nothing(pages: list[Board]) -> None:
    for seq in range(1, 3 * SLOTS):
        for board in pages:
            board.enter(note(seq))
        for board in pages:
            board.wait(note(seq))
            board.leave(note(seq))
    for board in pages:
        seen = [one for rank in range(3) for one in board.notes(rank)]
        assert {one.state for one in seen} == {states.ENDED}, "and nobody is left waiting"


def test_the_second_to_come_sees_the_difference_and_names_everybody(pages: list[Board]) -> None:
    pages[0].enter(note(1))
    words = (
        "disagree about collective 1 of group default",
        "rank 0: all_reduce(sum) float32 [4]  at lesson.py:3 in train",
        "rank 1: has not called it yet",
        "rank 2: broadcast(src=0) float32 [4]",
    )
    refused(pages[2], note(1, "broadcast(src=0) float32 [4]"), words)


def test_a_rank_may_be_ahead_or_behind(pages: list[Board]) -> None:
    for seq in range(1, 20):
        pages[0].enter(note(seq, f"all_reduce(sum) float32 [{seq}]"))
    pages[1].enter(note(1, "all_reduce(sum) float32 [1]"))
    refused(pages[1], note(2, "all_reduce(sum) float32 [1]"))


def test_messages_are_compared_between_their_two_ends_only(pages: list[Board]) -> None:
    send = Note("default 0->1 tag 0", (0, 1), 1, "send(to 1) int64 [2]", "", "int64 [2]", False)
    receive = send.__class__("default 0->1 tag 0", (0, 1), 1, "recv", "", "int64 [3]", False)
    other = Note("default 2->1 tag 0", (2, 1), 1, "send(to 1) int64 [9]", "", "int64 [9]", False)
    pages[0].enter(send)
    pages[2].enter(other)
    refused(pages[1], receive, "must be received with the shape and dtype")


def test_groups_that_meet_in_a_slot_do_no_harm(pages: list[Board]) -> None:
    """Hundreds of groups share the slots: notes are overwritten, never confused."""
    groups = [f"group {k}" for k in range(300)]
    for group in groups:
        for rank, board in enumerate(pages):
            board.enter(note(1, f"all_reduce(sum) float32 [{len(group)}]", group))
            if rank == 1:  # and what the others do in other groups is another matter
                board.enter(note(1, "barrier", f"{group}, odd"))
    assert len(pages[0].notes(1)) == SLOTS


def test_difference_is_found_in_every_group_while_its_note_is_there(pages: list[Board]) -> None:
    for k in range(300):
        pages[0].enter(note(1, "all_reduce", f"group {k}"))
        refused(pages[1], note(1, "barrier", f"group {k}"))


def test_more_in_flight_than_slots_still_shows_the_one_waited_for(pages: list[Board]) -> None:
    count = 3 * SLOTS
    for seq in range(1, count + 1):
        pages[0].enter(note(seq))
    assert [one.seq for one in pages[1].notes(0)] == list(range(count - SLOTS + 1, count + 1))
    pages[0].wait(note(1))  # written over long ago, and now what the rank stands still for
    assert [one.seq for one in pages[1].notes(0, (WAITED_FOR,))] == [1]
    refused(pages[1], note(1, "barrier"))
    pages[0].leave(note(1))
    assert pages[1].notes(0, (WAITED_FOR,)) == []


def test_the_end_of_an_operation_is_not_written_on_the_note_of_another(pages: list[Board]) -> None:
    pages[0].enter(note(1))
    pages[0].enter(note(1 + SLOTS), WAITED_FOR)  # the same slot
    pages[0].leave(note(1))
    assert [one.seq for one in pages[1].notes(0, (WAITED_FOR,))] == [1 + SLOTS]


def test_states_are_written_and_read(pages: list[Board]) -> None:
    for seq, state in enumerate((states.IN_FLIGHT, WAITED_FOR, states.ENDED, states.FAILED), 1):
        pages[0].enter(note(seq))
        if state == WAITED_FOR:
            pages[0].wait(note(seq))
        if state in (states.ENDED, states.FAILED):
            pages[0].leave(note(seq), failed=state == states.FAILED)
        assert [(one.seq, one.state) for one in pages[1].notes(0, (state,))] == [(seq, state)]
    assert [one.seq for one in pages[1].notes(0)] == [1, 2, 3, 4], "oldest first"
    assert "collective 1 of group default, at lesson.py:3" in pages[1].notes(0)[0].sentence()


def test_long_shapes_names_and_sources_fit_and_are_compared_to_the_end(pages: list[Board]) -> None:
    shape = list(range(500))
    huge = Note(
        "7 (ranks 0, 1, 2)", tuple(range(2 * MAX_RANKS)), 2**31, f"all_reduce(sum) {shape}",
        f"{'课程' * 300}.py:3 in train\\\"\n", compares=f"{shape}",
    )  # fmt: skip
    pages[0].enter(huge)
    (seen,) = pages[1].notes(0)
    assert (seen.group, seen.seq, seen.key) == (huge.group, huge.seq, huge.key)
    assert seen.ranks == huge.ranks[:MAX_RANKS]
    assert seen.what.startswith("all_reduce(sum) [0, 1,") and seen.what.endswith("498, 499]")
    assert pages[1].has_begun(0, huge)
    pages[1].enter(huge)
    different = Note(huge.group, huge.ranks, huge.seq, huge.what, "", compares=f"{shape}!")
    refused(pages[2], different, "498, 499")


def test_the_largest_world_fits(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", MAX_RANKS)
    page = Board(tmp_path / "board", MAX_RANKS, MAX_RANKS - 1)
    everyone = tuple(range(MAX_RANKS))
    page.enter(Note("default", everyone, 1, "w" * 1000, "s" * 1000, "c" * 1000), WAITED_FOR)
    assert board.notes(MAX_RANKS - 1, (WAITED_FOR,))[0].ranks == everyone
    page.close()
    board.close()


def test_how_far_a_rank_has_come_is_known_after_many_operations(pages: list[Board]) -> None:
    count = 10 * SLOTS
    for seq in range(1, count + 1):
        pages[0].enter(note(seq))
        pages[0].enter(note(seq, group="1 (ranks 0, 1, 2)"))
        pages[0].leave(note(seq))
    for seq in (1, SLOTS, count):
        assert pages[1].has_begun(0, note(seq))
        assert not pages[0].has_begun(1, note(seq)), "rank 1 has begun nothing"
    assert not pages[1].has_begun(0, note(count + 1))
    assert not pages[1].has_begun(0, note(1, group="2 (ranks 0, 1, 2)"))


def test_with_more_groups_than_marks_nothing_false_is_said(pages: list[Board]) -> None:
    groups = [f"group {k}" for k in range(3 * MARKS)]
    for group in groups:
        pages[0].enter(note(5, group=group))
    assert all(pages[1].has_begun(0, note(5, group=group)) for group in groups)
    known = [group for group in groups if not pages[1].has_begun(0, note(6, group=group))]
    assert len(known) < len(groups), "marks that two groups share tell nothing"


def write_all_day(path: Path, seconds: float) -> None:
    board, until_s, seq = Board(path, 1, 0), time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        seq += 1
        waited = Note("default", (0,), seq, f"all_reduce(sum) float32 [{seq}]", "lesson.py:3")
        board.enter(waited, WAITED_FOR)
        board.wait(waited)
        board.leave(waited)


def test_a_concurrent_reader_never_sees_half_a_note(tmp_path: Path) -> None:
    """Times half written once told the driver of a rank that had waited since the clock began."""
    reader = Board.create(tmp_path / "board", 1)
    began_s = time.monotonic()
    looks = highest = 0
    with World(1) as world:
        writer = threading.Thread(target=world.run, args=(write_all_day, tmp_path / "board", 2.0))
        writer.start()
        while writer.is_alive():
            for seen in reader.notes(0, (WAITED_FOR,)):
                looks += 1
                assert seen.since_s >= began_s, "a wait from before the test"
                assert seen.what == f"all_reduce(sum) float32 [{seen.seq}]"
                assert reader.has_begun(0, seen), "a rank has begun what it waits for"
                highest = max(highest, seen.seq)
    reader.close()
    assert looks > 100 and highest > 1000


def test_threads_of_a_rank_do_not_mix_their_notes(pages: list[Board]) -> None:
    def use(group: str) -> None:
        for seq in range(1, 400):
            one = note(seq, f"all_reduce(sum) float32 [{seq}]", group)
            pages[0].enter(one)
            pages[0].wait(one)
            pages[0].leave(one)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(use, [f"group {k}" for k in range(3)]))
    for seen in pages[1].notes(0):
        assert seen.what == f"all_reduce(sum) float32 [{seen.seq}]" and seen.state == states.ENDED
    for k in range(3):
        assert pages[1].has_begun(0, note(399, group=f"group {k}"))
        assert not pages[1].has_begun(0, note(400, group=f"group {k}"))
