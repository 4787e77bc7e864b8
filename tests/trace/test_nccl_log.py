"""What NCCL prints, read and drawn: each form of line, lines mixed and missing, the picture."""

from io import StringIO
from operator import attrgetter
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Circle, FancyArrowPatch
from rich.console import Console

from command import command
from labkit import plot, read_nccl_log
from labkit.plot.nccl_logs import COLORS
from labkit.trace.nccl_log import EXAMPLES, Connection, NcclLog, TreeNode, parse_nccl_log
from labkit.trace.nccl_log.summary import kinds, remarks, table
from tables import cases, raises

INIT = "comm 0x5{rank} rank {rank} nranks {size} cudaDev {rank} busId {rank}000{id} - Init {state}"


def line(text: str, rank: int = 0, host: str = "a", level: str = "INFO") -> str:
    return f"{host}:{100 + rank}:{200 + rank} [{rank}] NCCL {level} {text}"


def init(rank: int, size: int = 2, state: str = "COMPLETE", id: str = "", host: str = "a") -> str:
    name = f" commId {id}" if id else ""
    return line(INIT.format(rank=rank, size=size, id=name, state=state), rank, host)


def parsed(*lines: str) -> NcclLog:
    return parse_nccl_log("\n".join(lines))


def shown(log: NcclLog) -> str:
    text = StringIO()
    Console(width=160, file=text).print(table(log))
    return text.getvalue()


def test_two_nodes_are_read_whole() -> None:
    log = read_nccl_log(EXAMPLES["two_nodes"])
    group = log.main
    assert (log.version, log.networks) == ("2.21.5+cuda12.4", ["IB"])
    assert log.cards["node1"] == [f"mlx5_{i}:1/IB" for i in range(4)]
    assert log.settings["NCCL_SOCKET_IFNAME"] == "eth0"
    assert group.hosts() == {"node0": [0, 1, 2, 3], "node1": [4, 5, 6, 7]}
    assert group.size == 8 and group.channels == 4 and group.ready
    assert group.rings[0] == (0, 1, 2, 3, 4, 5, 6, 7)
    assert group.rings[3] == (0, 3, 2, 5, 4, 7, 6, 1)
    assert group.trees[0][0] == TreeNode(None, (1, 4))
    assert group.trees[1][6] == TreeNode(None, (2, 7))
    assert group.ranks[5].bus_id == "f000" and group.ranks[5].device == 1
    cards = ((3, "send"), (0, "receive"))
    ends = [Connection(0, 3, 4, f"NET/IB/{card}/GDRDMA", end) for card, end in cards]
    assert group.over(3, 4, channel=0) in ends
    assert group.thresholds.startswith("8/8/64 | 64/8/64")
    assert kinds(group, inside=True).keys() == {"P2P"}
    assert kinds(group, inside=False).keys() == {"NET/IB"}
    assert remarks(log) == []
    for words in ["2.21.5", "node1: 4, 5, 6, 7", "0 3 2 5 4 7 6 1  (channels 1, 3)", "NET/IB, "]:
        assert words in shown(log), words


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_what_it_is_and_hangs_together(name: str) -> None:
    text = EXAMPLES[name].read_text()
    head = " ".join(line for line in text.splitlines() if line.startswith("#"))
    assert "NOT a capture of a real run" in head and "composed for teaching" in head
    group = parse_nccl_log(text).main
    for channel, ring in group.rings.items():
        assert sorted(ring) == list(range(group.size))
        for one, other in group.hops(channel):
            link = group.over(one, other, channel)
            assert link, f"no connection {one} -> {other} on channel {channel}"
            assert group.same_node(one, other) == (not link.kind.startswith("NET"))
    for channel, tree in group.trees.items():
        for rank, node in tree.items():
            assert all(tree[child].parent == rank for child in node.children)
            if node.parent is not None:
                assert group.over(rank, node.parent, channel)
                assert group.over(node.parent, rank, channel)
    assert set(group.rings) == set(group.trees) == set(range(group.channels))


def test_slow_links_are_remarked() -> None:
    remarked = "\n".join(remarks(read_nccl_log(EXAMPLES["sockets"])))
    for words in ("socket.cc:484", "through host memory (SHM)", "plain TCP (NET/Socket)"):
        assert words in remarked
    text = EXAMPLES["two_nodes"].read_text().replace("/GDRDMA", "")
    assert "no GPUDirect RDMA" in "\n".join(remarks(parse_nccl_log(text)))


@cases(
    ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", Connection(0, 0, 1, "P2P/CUMEM")),
    ("Channel 03 : 3[b000] -> 0[6000] via P2P/direct pointer",
     Connection(3, 3, 0, "P2P/direct pointer")),
    ("Ring 00 : 155[3d000] -> 157[b2000] via P2P/IPC", Connection(0, 155, 157, "P2P/IPC")),
    ("Channel 07/0 : 15[7] -> 6[6] [send] via NET/IBext_v8/3(5)/GDRDMA",
     Connection(7, 15, 6, "NET/IBext_v8/3(5)/GDRDMA", "send")),
    ("Channel 00/0 : 2[0] -> 0[0] [receive] via NET/Socket/1 comm 0x55 nRanks 04",
     Connection(0, 2, 0, "NET/Socket/1", "receive")),
)  # fmt: skip
def test_each_versions_connection_is_read(text: str, expected: Connection) -> None:
    assert parse_nccl_log(line(text)).main.connections == [expected]
    assert expected.gpu_direct == ("GDRDMA" in text)
    assert expected.kind in ("P2P", "NET/IBext_v8", "NET/Socket")


RING = line("Channel 00/01 :    0   1", host="gpu-7")
PLACED = "h1:1:2 [3] misc/socket.cc:484 (ncclSocketConnect) NCCL WARN closed by peer"
TREES = {0: {2: TreeNode(None, (3, 10))}, 1: {2: TreeNode(1, ())}}


@cases(
    (line("Trees [0] 3/10/-1->2->-1 [1] -1/-1/-1->2->1"), "main.trees", TREES),
    ("[155] " + RING, "main.rings", {0: (0, 1)}),
    ("3: " + RING, "main.rings", {0: (0, 1)}),
    ("[2026-01-02 03:04:05] " + RING, "main.rings", {0: (0, 1)}),
    (PLACED, "warnings", ["h1 [3]: closed by peer (misc/socket.cc:484)"]),
    ("h1:1:2 [3] NCCL WARN bad", "warnings", ["h1 [3]: bad"]),
    (line("24 coll channels, 0 collnet channels"), "main.channels", 24),
    (line("Using network AWS Libfabric"), "networks", ["AWS Libfabric"]),
    (line("Using network IB"), "networks", ["IB"]),
)
def test_a_line_is_read(text: str, name: str, expected: object) -> None:
    assert attrgetter(name)(parse_nccl_log(text)) == expected


def test_other_lines_are_passed_over() -> None:
    log = parsed("step 1 loss 2.3", line("Setting affinity for GPU 3"), "", "\x00\udc80")
    assert (log.lines, log.understood, log.communicators) == (1, 0, [])
    raises("no communicator; run with NCCL_DEBUG=INFO", lambda: log.main)


def test_communicators_are_kept_apart_and_the_largest_is_first() -> None:
    small = [*(init(rank, 2, "START", "0xaa") for rank in (0, 1)), line("Channel 00/01 : 0 1")]
    log = parsed(*small, init(0, 4, "START", "0xbb"), line("Channel 00/02 : 0 2 3 1"))
    groups = [(group.id, group.size, group.rings[0]) for group in log.communicators]
    assert groups == [("0xbb", 4, (0, 2, 3, 1)), ("0xaa", 2, (0, 1))]
    assert "1 communicators, of 2 ranks" in shown(log)
    # A log without its head is one.
    complete = (init(rank, id="0xaa") for rank in (0, 1))
    (only,) = parsed(line("Channel 00/01 : 0 1"), *complete).communicators
    assert only.rings and only.ready and only.size == 2


SPLIT = (
    "ncclCommSplit comm 0x6{rank} rank {own} nranks 2 cudaDev {rank} nvmlDev 0 busId {rank}000 "
    "parent 0x5{rank} {count} 1 color {color} key {rank}{dash}- Init {state}"
)


@pytest.mark.parametrize("count", ["splitCount", "childCount"])
def test_split_communicators_are_kept_apart_from_their_parent(count: str) -> None:
    """Composed after NCCL's formats: START of 2.21 has no space before its dash."""
    lines = [init(rank, 4, "COMPLETE", "0xaa") for rank in range(4)]
    lines += [line("Channel 00/01 : 0 1 2 3")]
    for rank in range(4):
        about = {"rank": rank, "own": rank % 2, "count": count, "color": -7 + rank // 2}
        lines += [line(SPLIT.format(**about, dash="", state="START"), rank)]
        lines += [line("Channel 00/02 : 1 0", rank)] if rank == 2 else []
        lines += [line(SPLIT.format(**about, dash=" ", state="COMPLETE"), rank)]
    log = parsed(*lines)
    groups = [(group.id, group.size, len(group.ranks), group.rings) for group in log.communicators]
    assert groups == [
        ("0xaa", 4, 4, {0: (0, 1, 2, 3)}),
        ("0xaa split 1 color -7", 2, 2, {}),
        ("0xaa split 1 color -6", 2, 2, {0: (1, 0)}),
    ]
    assert log.main.ready and remarks(log) == []


def test_threads_of_a_process_set_up_a_communicator_each() -> None:
    def say(tid: int, text: str) -> str:
        return f"a:1:{tid} [0] NCCL INFO {text}"

    big = INIT.format(rank=0, size=4, id=" commId 0xaa", state="START")
    small = INIT.format(rank=0, size=2, id=" commId 0xbb", state="START").replace("0x50", "0x60")
    first, second = parsed(
        say(11, big), say(12, small),
        say(11, "Channel 00/01 : 0 1 2 3"), say(12, "Channel 00/01 : 0 1"),
        say(99, "Channel 01/0 : 0[0] -> 2[2] via P2P/IPC comm 0x50 nRanks 04"),
        say(99, "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"),
    ).communicators  # fmt: skip
    assert [first.rings[0], second.rings[0]] == [(0, 1, 2, 3), (0, 1)]
    assert first.connections == [Connection(1, 0, 2, "P2P/IPC")], "the line names it"
    assert second.connections == [Connection(0, 0, 1, "P2P/IPC")], "the process's last"


def test_a_connection_is_that_of_its_channel_and_an_unplaced_rank_is_on_no_node() -> None:
    lines = ["Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "Channel 01/0 : 0[0] -> 1[1] via SHM"]
    group = parsed(init(0), *map(line, lines)).main
    assert group.same_node(0, 0) and not group.same_node(0, 7) and not group.same_node(7, 8)
    assert [group.over(0, 1, i) for i in (0, 1, None)] == [*group.connections, group.connections[0]]
    assert group.over(0, 1, 2) is None and group.over(1, 0) is None


def test_without_start_up_lines_the_transport_says_what_is_inside() -> None:
    inside = line("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM")
    log = parsed(inside, line("Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA"))
    assert kinds(log.main, inside=True).keys() == {"P2P"}
    assert kinds(log.main, inside=False).keys() == {"NET/IB"}
    assert remarks(log) == [] and "not logged" in shown(log)


def test_many_warnings_are_not_all_repeated() -> None:
    log = parsed(init(0, 1), *(line(f"bad {i}", level="WARN") for i in range(9)))
    *warnings, last = remarks(log)
    assert len(warnings) == 4 and last == "5 more warnings: search the log for NCCL WARN"


def test_ranks_that_hang_and_ranks_that_the_log_does_not_show_are_named() -> None:
    log = parsed(init(0, 4), init(1, 4, "START"))
    hangs, unseen = remarks(log)
    assert not log.main.ready
    assert hangs == "no Init COMPLETE from ranks 1: start-up failed or hangs there"
    assert unseen.startswith("no start-up line from ranks 2, 3: is this the output of all nodes")


def test_nvlink_between_nodes_is_not_the_network_without_gpudirect() -> None:
    over = line("Channel 00/0 : 0[0] -> 1[1] via P2P/MNNVL")
    log = parsed(init(0), init(1, host="b"), over)
    assert kinds(log.main, inside=False).keys() == {"P2P"} and remarks(log) == []
    assert kinds(parse_nccl_log(over).main, inside=False).keys() == {"P2P"}, "also without hosts"


def test_different_versions_are_remarked() -> None:
    ranks, version = (init(0), init(1)), "NCCL version 2.21.5+cuda12.4"
    (remark,) = remarks(parsed(*ranks, version, line("NCCL version 2.19.3+cuda12.2", 1)))
    assert "different NCCL versions (2.21.5+cuda12.4, 2.19.3+cuda12.2)" in remark
    assert remarks(parsed(*ranks, version, version, "NCCL version 2.21.5.")) == []


def test_ranks_mixed_in_any_order_are_the_same_log() -> None:
    lines = EXAMPLES["two_nodes"].read_text().splitlines()
    forward, backward = (
        (group.rings, group.trees, group.ranks, set(group.connections))
        for group in (parsed(*lines).main, parsed(*lines[::-1]).main)
    )
    assert forward == backward


def arrows(axes: Axes) -> list[str]:
    """The colours of the arrows in a panel."""
    return [to_hex(arrow.get_edgecolor()).upper() for arrow in axes.findobj(FancyArrowPatch)]


def test_the_picture_has_each_different_ring_and_tree_once() -> None:
    figure = plot.nccl(read_nccl_log(EXAMPLES["two_nodes"]))
    titles = [f"{what} of channels {of}" for what in ("ring", "tree") for of in ("0, 2", "1, 3")]
    assert [axes.get_title() for axes in figure.axes] == titles
    for axes, links in zip(figure.axes, (8, 8, 7, 7)):
        colours = arrows(axes)
        assert len(colours) == links and len(axes.findobj(Circle)) == 8
        crossing = 2 if links == 8 else 1
        assert colours.count(COLORS["network, GPUDirect"]) == crossing
        assert colours.count(COLORS["P2P"]) == links - crossing
    without = parsed(init(0), init(1), line("Channel 00/01 : 0 1"))
    assert set(arrows(plot.nccl(without).axes[0])) == {COLORS["not in the log"]}


def test_what_cannot_be_drawn_is_refused_and_the_command_goes_on_without(tmp_path: Path) -> None:
    raises("no rings and no trees", plot.nccl, parsed(init(0)))
    ring = line("Channel 00/01 : " + " ".join(map(str, range(65))))
    lines = [*(init(rank, 65) for rank in range(65)), ring]
    raises("65 ranks is too large to draw", plot.nccl, parsed(*lines))
    file, out = tmp_path / "big.log", tmp_path / "big.png"
    file.write_text("\n".join(lines))
    assert "No picture: 65 ranks" in command(f"nccl-log {file} --out {out}")
    assert not out.exists()


def test_the_command_takes_one_file_of_each_process_and_draws(tmp_path: Path) -> None:
    """As NCCL_DEBUG_FILE=%h.%p writes them; the last one from standard input."""
    lines, files = EXAMPLES["sockets"].read_text().splitlines(), []
    for process in ("node0:4100", "node0:4101", "node1:4200", "node1:4201"):
        files.append(tmp_path / process)
        own = [line for line in lines if line.startswith(process)]
        files[-1].write_text("\n".join(own))  # NCCL's may lack its last newline, cut off
    out, *paths = (tmp_path / "drawn.png", *map(str, files[:3]))
    shown = command(f"nccl-log {' '.join(paths)} - --out {out}", input=files[3].read_text())
    assert "4 logs" in shown and "node0: 0, 1; node1: 2, 3" in shown
    assert "no start-up line" not in shown and "NET/Socket" in shown
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_command_reads_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = EXAMPLES["two_nodes"].read_bytes() + b"\xff\n"
    assert "standard input" in command("nccl-log -", input=log)
    assert Path("nccl.png").exists()
