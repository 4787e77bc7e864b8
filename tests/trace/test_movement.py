"""How a collective moves data: recorded on real ranks, told in steps, drawn."""

from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch

from labkit import World, plot, watch_collective
from labkit.comm.collectives.costs import cost
from labkit.labs.lab_02.movements import in_words
from labkit.plot.movements import RANKS
from labkit.plot.style import FAINT
from labkit.trace.movement import Content, Movement, Note, content_of, movement_of, number
from labkit.trace.recording.movement import WatchedComm
from tables import cases, raises
from worlds import world_fixture

ALL = tuple(range(8))

world = world_fixture(sizes=[2, 3, 4, 5], device="cpu", backend="gloo", timeout_s=5)


def ranks_in(held: tuple[tuple[Content, ...], ...]) -> list[list[tuple[int, ...]]]:
    """Whose numbers are in each chunk of each rank."""
    return [[content.ranks for content in row] for row in held]


def ends(movement: Movement) -> list[set[tuple[int, int]]]:
    """(from, to) of the messages of each step."""
    return [{(x.source, x.target) for x in frame.messages} for frame in movement.frames]


@pytest.mark.parametrize("size", range(2, 9))
def test_a_sum_lists_the_ranks_and_the_chunk_it_contains(size: int) -> None:
    for chunk in range(size):
        whole = sum(number(rank, chunk, size) for rank in range(size))
        assert content_of(whole, size) == Content((1,) * size, chunk)
        twice = whole + number(1, chunk, size)
        assert content_of(twice, size).counts == (1, 2, *[1] * (size - 2))
        as_in_memory = int(torch.tensor(number(size - 1, chunk, size)))
        assert content_of(as_in_memory, size).ranks == (size - 1,)


def test_chunks_that_are_not_sums_are_distinguished() -> None:
    assert content_of(0, 4).is_empty and content_of(0, 4).is_right_in(2)
    assert content_of(0x5A5A5A5A5A, 4).counts == ()
    assert not content_of(12345, 4).is_right_in(0)
    mixed = content_of(number(0, 1, 4) + number(2, 3, 4), 4)
    assert mixed.chunk is None and mixed.ranks == (0, 2) and not mixed.is_right_in(1)
    assert content_of(number(0, 1, 4), 4).is_right_in(1)
    assert not content_of(number(0, 1, 4), 4).is_right_in(2)
    assert not content_of(2 * number(0, 1, 4), 4).is_right_in(1)


def test_a_ring_reduces_in_half_of_its_steps_and_gathers_in_the_other(world: World) -> None:
    n = world.size
    movement = watch_collective(world, "all_reduce", "ring")
    around = {(rank, (rank + 1) % n) for rank in range(n)}
    assert ends(movement) == [around] * (2 * (n - 1))
    assert movement.sent_chunks == [2 * (n - 1)] * n
    assert all(len(one.chunks) == 1 for frame in movement.frames for one in frame.messages)
    for step, frame in enumerate(movement.frames, 1):
        for rank, row in enumerate(ranks_in(frame.held)):
            complete = [c for c in range(n) if row[c] == ALL[:n]]
            assert len(complete) == max(0, step - n + 2), "one more in each step from n - 1 on"
            if step < n:
                arrived = (rank - 1 - step) % n  # has been added to by step ranks before
                assert row[arrived] == tuple(sorted((rank - k) % n for k in range(step + 1)))


@pytest.mark.parametrize(
    "algorithm", ["ring", "tree", "naive", "recursive_doubling", "halving_doubling", "double_tree"]
)
def test_every_all_reduce_ends_with_the_sum_everywhere(world: World, algorithm: str) -> None:
    n = world.size
    movement = watch_collective(world, "all_reduce", algorithm)
    if algorithm in ("tree", "ring", "naive"):
        assert len(movement.frames) == cost("all_reduce", algorithm, n, 64).steps
    assert ranks_in(movement.first) == [[(rank,)] * n for rank in range(n)]
    assert ranks_in(movement.frames[-1].held) == [[ALL[:n]] * n] * n
    for frame in movement.frames:
        assert all(c.is_right_in(i) for row in frame.held for i, c in enumerate(row))


def test_a_rank_sends_one_message_a_step_and_receives_one(world: World) -> None:
    for collective, algorithm in [("all_reduce", "double_tree"), ("gather", "flat")]:
        for frame in watch_collective(world, collective, algorithm).frames:
            sources, targets = zip(*((x.source, x.target) for x in frame.messages), strict=True)
            assert len(set(sources)) == len(set(targets)) == len(frame.messages) > 0


def test_what_the_others_hold_at_first_and_at_the_end(world: World) -> None:
    n, last = world.size, world.size - 1
    own = [[(rank,) if rank == chunk else () for chunk in range(n)] for rank in range(n)]
    everyone = [[(rank,) for rank in range(n)]] * n
    from_last = [[(last,) if rank == last else () for _ in range(n)] for rank in range(n)]

    def held(collective: str, algorithm: str, **root: int) -> tuple[Any, Any]:
        movement = watch_collective(world, collective, algorithm, **root)
        return ranks_in(movement.first), ranks_in(movement.frames[-1].held)

    assert held("all_gather", "bruck") == (own, everyone)
    first, end = held("gather", "flat", root=last)
    assert first == own and end[last] == everyone[0]
    assert held("broadcast", "tree", root=last) == (from_last, [[(last,)] * n] * n)
    first, end = held("scatter", "flat", root=last)
    assert first == from_last and all(end[r][r] == (last,) for r in range(n))
    _, end = held("reduce", "chain", root=last)
    assert end[last] == [ALL[:n]] * n
    _, end = held("reduce_scatter", "ring")
    assert all(end[r][r] == ALL[:n] for r in range(n))


def test_a_tree_of_four_doubles_the_holders_each_step(world4: World) -> None:
    movement = watch_collective(world4, "broadcast", "tree")
    assert ends(movement) == [{(0, 1)}, {(0, 2), (1, 3)}]
    assert repr(movement) == (
        "broadcast by tree on 4 ranks: 2 steps; the busiest rank sends 8 chunks; a buffer has 4"
    )


def test_two_nodes_exchange_only_their_shares(world4: World) -> None:
    movement = watch_collective(world4, "all_reduce", "hierarchical", ranks_per_node=2)
    between = [m for f in movement.frames for m in f.messages if m.source // 2 != m.target // 2]
    assert sum(len(m.contents) for m in between) == 8 < 2 * 4 * 2
    assert ranks_in(movement.frames[-1].held) == [[ALL[:4]] * 4] * 4


def test_the_same_picture_on_every_run(world4: World) -> None:
    first, *others = (watch_collective(world4, "all_reduce", "double_tree") for _ in range(4))
    assert others == [first] * 3


def users_ring(
    comm: Any, x: torch.Tensor, steps: int | None = None, add_always: bool = False
) -> None:
    n = comm.size
    right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
    for step in range(2 * (n - 1) if steps is None else steps):
        give, take = (comm.rank - 1 - step) % n, (comm.rank - 2 - step) % n
        room = torch.empty(1, dtype=x.dtype)
        handle = comm.isend(x[give : give + 1], right)
        comm.recv(room, left)
        handle.wait()
        if step < n - 1 or add_always:
            x[take] += room[0]
        else:
            x[take] = room[0]


ADDS_ALWAYS = partial(users_ring, add_always=True)


@pytest.mark.slow
def test_a_users_ring_moves_as_the_librarys_and_its_mistakes_show(world: World) -> None:
    own, theirs = (watch_collective(world, "all_reduce", x) for x in (users_ring, "ring"))
    assert own.name == "all_reduce by users_ring"
    for frame, expected in zip(own.frames, theirs.frames, strict=True):
        assert frame.held == expected.held
        assert {x.chunks for x in frame.messages} == {x.chunks for x in expected.messages}
    n = world.size
    too_few = partial(users_ring, steps=2 * n - 3)
    last = watch_collective(world, "all_reduce", too_few).frames[-1]
    holes = [rank for row in ranks_in(last.held) for rank in row if rank != ALL[:n]]
    assert len(holes) == n
    last = watch_collective(world, "all_reduce", ADDS_ALWAYS).frames[-1]
    wrong = [c for row in last.held for i, c in enumerate(row) if not c.is_right_in(i)]
    assert wrong and all(max(content.counts) >= 2 for content in wrong)


def test_a_chunk_in_the_wrong_place_is_reported(world4: World) -> None:
    def mixes_up(comm: Any, x: torch.Tensor) -> None:
        users_ring(comm, x)
        x.copy_(x.roll(1))

    last = watch_collective(world4, "all_reduce", mixes_up).frames[-1]
    assert [content.chunk for content in last.held[0]] == [3, 0, 1, 2]
    assert not any(c.is_right_in(i) for row in last.held for i, c in enumerate(row))


def test_waiting_before_sending_takes_more_steps(world4: World) -> None:
    def one_after_the_other(comm: Any, x: torch.Tensor) -> None:
        if comm.rank > 0:
            comm.recv(x, comm.rank - 1)
        if comm.rank < comm.size - 1:
            comm.send(x, comm.rank + 1)

    movement = watch_collective(world4, "broadcast", one_after_the_other)
    assert ends(movement) == [{(0, 1)}, {(1, 2)}, {(2, 3)}]
    assert [sum(row != [()] * 4 for row in ranks_in(f.held)) for f in movement.frames] == [2, 3, 4]


def test_an_unawaited_message_has_its_step_too() -> None:
    key = (0, 1, 0, 0)
    send = Note("send", (number(0, 0, 2), 0), key, ((0, number(0, 0, 2)),))
    logs = [[send, Note("end", send.buffer)], [Note("recv", (0, 0), key), Note("end", (0, 0))]]
    assert ends(movement_of("test", logs)) == [{(0, 1)}]


def test_a_watched_send_passes_its_own_tensor_on_and_an_isend_a_copy_and_recv_blocks() -> None:
    comm, x = MagicMock(rank=0, size=2, ranks=(0, 1)), torch.tensor([1, 2])
    watched = WatchedComm(comm, x)
    watched.send(x, 1)
    watched.isend(x, 1).wait()
    (sent, *_), (copied, *_) = comm.send.call_args.args, comm.isend.call_args.args
    assert sent is x and copied is not x and copied.tolist() == [1, 2]
    assert [note.kind for note in watched.notes] == ["send", "wait"] * 2
    comm.recv.side_effect = lambda arrived, src, tag: arrived.copy_(torch.tensor([3, 4]))
    watched = WatchedComm(comm, x)
    watched.recv(x, 1)
    assert comm.recv.called and not comm.irecv.called and x.tolist() == [3, 4]
    notes = [(note.kind, note.buffer) for note in watched.notes]
    assert notes == [("recv", (1, 2)), ("wait", (1, 2))]  # as the room was until then


def test_what_cannot_be_watched_is_refused(world3: World, world4: World) -> None:
    watch = watch_collective
    raises("'all_to_all' cannot be watched; choose one of", watch, world4, "all_to_all", "pairwise")
    raises("'rong'; choose one of naive, tree, ring", watch, world4, "all_reduce", "rong")
    with pytest.raises(ValueError, match="sent nothing through comm.send"):
        watch_collective(world4, "all_reduce", lambda comm, x: comm.all_reduce(x))
    raises("'recursive_doubling'", watch, world3, "all_gather", "recursive_doubling")


def test_an_arrow_for_each_run_of_chunks_and_a_panel_for_each_step(world4: World) -> None:
    movement = watch_collective(world4, "all_reduce", "ring")
    (axes,) = plot.movement(movement).axes
    texts = [text.get_text() for text in axes.texts]
    assert [t for t in texts if t.startswith("step")] == [f"step {k}" for k in range(1, 7)]
    assert texts.count("at the end") == 1
    assert sum(isinstance(patch, FancyArrowPatch) for patch in axes.patches) == 6 * 4
    (axes,) = plot.movement(movement, [7]).axes
    assert not any(isinstance(patch, FancyArrowPatch) for patch in axes.patches)
    raises("choose 1 to 6, or 7 for the final state", plot.movement, movement, [8])

    # The stripes of a panel are what the ranks hold before its step.
    held = [movement.first, *(frame.held for frame in movement.frames)]
    for step in (1, 4, 7):
        (stripes,) = plot.movement(movement, [step]).axes[0].collections
        assert [to_hex(colour, False).upper() for colour in stripes.get_facecolor()] == [
            RANKS[k] if count else FAINT
            for row in held[step - 1]
            for content in row
            for k, count in enumerate(content.counts)
        ]


def test_a_mistake_is_marked(world4: World) -> None:
    for algorithm, wrong in ((ADDS_ALWAYS, True), (users_ring, False)):
        figure = plot.movement(watch_collective(world4, "all_reduce", algorithm))
        assert ("2×" in [text.get_text() for text in figure.axes[0].texts]) == wrong


def test_a_slider_walks_through_the_steps(world4: World) -> None:
    pytest.importorskip("ipywidgets", reason="makes the slider")
    steps = plot.steps(watch_collective(world4, "broadcast", "tree"))
    first = steps.picture.value
    steps.step.value = 3
    assert bytes(first).startswith(b"\x89PNG") and steps.picture.value != first
    assert steps.step.max == 3 and "image/png" in steps._repr_mimebundle_()


@cases(
    (Content((0, 0, 0), None), "nothing"),
    (Content((), None), "values that are not a sum of the ranks' data"),
    (Content((1, 0, 1), 1), "the data of ranks 0 and 2"),
    (Content((0, 1, 0), 2), "the data of rank 1 for chunk 2"),
    (Content((1, 3, 1), 1), "the data of ranks 0, 1 and 2, with rank 1's added 3 times,"),
    (Content((1, 1, 0), None), "the data of ranks 0 and 1, from several chunks,"),
)
def test_a_check_says_what_is_in_chunk_1(content: Content, words: str) -> None:
    assert in_words(content, 1) == words
