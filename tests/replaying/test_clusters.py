"""Clusters: every number has its source, and what is wrong in a file is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labkit import read_clusters, write_clusters
from labkit.clusters import Cluster, Device, Level, cluster, known_clusters
from tables import cases, raises


@pytest.mark.parametrize("name", known_clusters())
def test_every_number_of_a_known_cluster_has_its_source(name: str) -> None:
    known = cluster(name)
    device = known.device
    assert device.sources.keys() == {
        "memory_bytes", "memory_bytes_per_s", "launch_s", "matmul_reached", "memory_reached",
        "host_s" if "fitted" in name else "tile", *(f"peak_flops.{x}" for x in device.peak_flops),
    }  # fmt: skip
    for level in filter(None, (known.inside, known.between)):
        optional = {"reached", "start_s"} & level.sources.keys()
        assert level.sources.keys() == {"bytes_per_s", "latency_s", *optional}
        assert level.reached == 1 or "reached" in optional
        assert level.start_s == 0 or "start_s" in optional
    assert "float32" in device.peak_flops


def test_a_matrix_product_reaches_its_rate_by_its_sides() -> None:
    device = cluster("selene").device
    large, small = (device.matmul_flops_per_s("bfloat16", [side] * 3) for side in (10**6, 128))
    assert large == pytest.approx(0.85 * 312e12, rel=1e-3)
    assert small == pytest.approx(0.85 * 312e12 / 8)


def test_ranks_stand_node_by_node_and_share_the_wires_between() -> None:
    one = cluster("v100-cloud")
    assert (one.size, one.node_of(7), one.node_of(8)) == (128, 0, 1)
    assert one.level_of([0, 3, 7]).name == "NVLink 2"
    assert one.level_of([7, 8]).name == one.level_of(range(128)).name == "Ethernet"
    assert one.share_bytes_per_s(one.inside) == 150e9
    assert one.share_bytes_per_s(one.between) == 25e9 / 8 / 8
    assert cluster("selene").share_bytes_per_s(cluster("selene").level_of([0, 8])) == 25e9


def test_an_unknown_name_is_reported_with_the_known_ones(tmp_path: Path) -> None:
    raises("no cluster 'frontier'; choose one of h200-node, dgx-h100", cluster, "frontier")
    raises("no rank 8: .* have ranks 0 to 7", cluster("h200-node").level_of, [0, 8])
    rate_of = cluster("v100-cloud").device.peak_flops_of
    raises("no rate for bfloat16; choose one of float64, float32, float16", rate_of, "bfloat16")
    raises("2 nodes, but no level between", replace, cluster("workstation"), nodes=2)
    raises("nodes=0", replace, cluster("selene"), nodes=0)
    raises("none.toml", read_clusters, tmp_path / "none.toml", error=FileNotFoundError)


OWN = """
[clusters.mine]
title = "two old ones"
device = "v100"
nodes = 2
[[clusters.mine.levels]]
devices = 2
ports = 2
bytes_per_s = [12e9, "measured"]
latency_s = [0, "measured"]
[[clusters.mine.levels]]
name = "Ethernet"
ports = 1
bytes_per_s = [125e6, "printed on the switch"]
latency_s = [1e-4, "ping"]
"""
DEVICE = """
[devices.own]
memory_bytes = [80e9, "printed on it"]
memory_bytes_per_s = [2e12, "printed on it"]
launch_s = [5e-6, "a guess"]
peak_flops.bfloat16 = [312e12, "printed on it"]
"""


def own(tmp_path: Path, text: str) -> dict[str, Cluster]:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return read_clusters(path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    theirs = own(tmp_path, OWN.replace('"v100"', '"own"') + DEVICE)["mine"]
    assert theirs.device.peak_flops == {"bfloat16": 312e12}
    mine = own(tmp_path, OWN)["mine"]
    assert (mine.size, mine.title, mine.device) == (4, "two old ones", cluster("v100-cloud").device)
    assert mine.between is not None and mine.between.sources["latency_s"] == "ping"


RATE, DELAY = '[12e9, "measured"]', '[1e-4, "ping"]'
NO_SOURCE = "write a number and its source"


@cases(
    ('"v100"', '"v1000"', "clusters.mine: no device 'v1000'; choose one of h200"),
    ("nodes = 2", "nodes = 2.5", "nodes = 2.5; it must be a whole number"),
    ("nodes = 2", "", "nodes = None"),
    ("nodes = 2", "nodes = true", "nodes = True"),
    ("devices = 2", "devices = 0", r"levels\[0\]: devices = 0"),
    (RATE, "12e9", NO_SOURCE),
    (RATE, '[12e9, ""]', NO_SOURCE),
    (RATE, '[nan, "measured"]', NO_SOURCE),
    (RATE, '[true, "measured"]', NO_SOURCE),
    (RATE, f'[{10**400}, "measured"]', NO_SOURCE),
    (RATE, '[0, "measured"]', "it must be greater than 0"),
    (RATE, '[12, "measured"]', "bytes_per_s = 12 is not plaus.*bytes per second, not"),
    (RATE, '[12e18, "measured"]', "bytes_per_s = 1.2e.19 is not plausible"),
    (DELAY, '[-1, "ping"]', r"levels\[1\]: latency_s = -1"),
    (DELAY, '[100, "ping"]', "latency_s = 100 .*seconds, not microseconds"),
    (DELAY, f'{DELAY}\nreached = [75, "x"]', r"levels\[1\]: reached = 75; it must be a fraction"),
    (DELAY, f'{DELAY}\nreached = [0, "x"]', r"levels\[1\]: reached = 0; it must be greater than 0"),
    (f"latency_s = {DELAY}", "", rf"levels\[1\]: latency_s = None; {NO_SOURCE}"),
    ("title", "titel", "unknown name 'titel'; choose one of device, levels, nodes, title"),
    ("[clusters.mine]", "[cluster.mine]", "unknown name 'cluster'; choose one of clusters"),
    ("nodes = 2", "nodes =", "is not valid TOML"),
    ('"v100"', '["v100"]', "no device"),
    ("ports = 1", "ports = 1\ndevices = 2", r"levels\[1\]: unknown name 'devices'"),
    ("ports = 1", "", r"levels\[1\]: ports = None"),
    ("[80e9", "[80", "memory_bytes = 80 is not plausible; .*bytes, not GB"),
    ("[2e12", "[2000", "memory_bytes_per_s = 2000 .*bytes per second, not GB/s"),
    ("[312e12", "[312", "peak_flops: bfloat16 = 312 .*FLOP/s, not TFLOP/s"),
    ("[5e-6", "[5", "launch_s = 5 .*seconds, not microseconds"),
    ("[5e-6", "[-5e-6", "launch_s = -5e-06; it must be greater than 0"),
    ('launch_s = [5e-6, "a guess"]', "", f"launch_s = None; {NO_SOURCE}"),
    ('peak_flops.bfloat16 = [312e12, "printed on it"]', "", "peak_flops: expected a table"),
    ('.bfloat16 = [312e12, "printed on it"]', " = {}", "no peak rate; add one"),
    ("[5e-6", '[5e-6, "x"]\nmatmul_reached = [1.2', "matmul_reached = 1.2; it must be a fraction"),
)
def test_an_error_in_a_file_is_named(was: str, then: str, message: str, tmp_path: Path) -> None:
    text = OWN if was in OWN else OWN.replace('"v100"', '"own"') + DEVICE
    assert was in text
    raises(message, own, tmp_path, text.replace(was, then, 1))


@cases(("nodes = 2", "nodes = 0"), ("devices = 2", "devices = 0"))
def test_a_wrong_device_is_named_before_a_wrong_count(was: str, then: str, tmp_path: Path) -> None:
    text = OWN.replace('"v100"', '"own"') + DEVICE.replace("[5e-6", "[5")
    raises("launch_s = 5 .*seconds", own, tmp_path, text.replace(was, then, 1))


def test_written_files_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    write_clusters(path, known_clusters())
    assert read_clusters(path) == known_clusters()
    assert list(read_clusters(path)) == list(known_clusters())
    assert path.read_text().count("[devices.") == 6  # workstation and internet have the same
    # So do names, numbers and sources of all kinds.
    text = 'say "who"\\ \n\t\x7f\x01 é 卡 \U0001f600 [a] = #'
    numbers = ("memory_bytes", "memory_bytes_per_s", "launch_s", "peak_flops.my dtype", "tile")
    sources = dict.fromkeys(numbers, text)
    rates = {"my dtype": 2 / 3 * 1e13}
    device = Device(text, rates, 1e14, 1234567890.125, 0.0, tile=1 / 3, sources=sources)
    twin = replace(device, launch_s=1e-300)  # of the same name: two devices in the file
    wires = Level(text, 100000.1, 0.0, 3, sources={"bytes_per_s": text, "latency_s": text})
    clusters = {
        name: Cluster(name, text, of, nodes=2, devices_per_node=3, inside=wires, between=wires)
        for name, of in (("", device), ('a "b".c', twin))
    }
    write_clusters(path, clusters)
    assert read_clusters(path) == clusters


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    path, known = tmp_path / "none.toml", cluster("workstation")

    def inside(**changes: Any) -> Cluster:
        return replace(known, inside=replace(known.inside, **changes))

    sources = known.inside.sources
    without = {name: source for name, source in sources.items() if name != "reached"}
    raises("under 'here' is named 'workstation'", write_clusters, path, {"here": known})
    raises("no cluster to write", write_clusters, path, {})
    for message, changed in (
        ("PCIe.*: reached has no source", inside(sources=without)),
        ("would not read back", inside(sources=sources | {"weight": "none"})),
        ("write a number and", inside(bytes_per_s=float("nan"))),
        ("write a number and", inside(bytes_per_s=float("inf"))),
        ("0", inside(bytes_per_s=-1)),
        ("RTX 4090: memory_bytes has no source",
         replace(known, device=replace(known.device, sources={}))),
        ("encode", replace(known, title="\ud800")),
    ):  # fmt: skip
        raises(message, write_clusters, path, {"workstation": changed})
        assert not path.exists()
    unreached = inside(reached=1.0, sources=without)  # what need not be there
    write_clusters(path, {"workstation": unreached})
    assert read_clusters(path)["workstation"].inside == unreached.inside
