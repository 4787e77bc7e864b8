"""What carries the tensors of a world: what is asked for, what is picked, and how it is told."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from comm_contract import events_of
from labkit import Comm, Link, World, record
from labkit.runtime import folders
from labkit.runtime.pick import Pick, pick_transport
from tables import cases, raises

MEMORY = Path("/dev/shm")
NCCL = Pick("nccl", "cuda", "as asked")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_TRANSPORT", raising=False)


def transports() -> set[str]:
    return {event.transport for event in events_of(Comm(), 10).values()}


@cases(
    ({}, "", "shm"),
    ({"device": "cpu"}, "", "shm"),
    ({"backend": "gloo"}, "", "gloo"),
    ({"link": Link(gbps=1000)}, "", "gloo"),
    ({"transport": "gloo"}, "shm", "gloo"),
    ({"transport": "shm", "backend": "gloo"}, "gloo", "shm"),
    ({}, "gloo", "gloo"),
    ({"backend": "gloo"}, "shm", "shm"),
    ({"link": Link(gbps=1000)}, "shm", "gloo"),
    ids=str,
)
def test_the_argument_decides_then_the_environment_then_the_backend(
    options: dict, variable: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_TRANSPORT", variable)
    monkeypatch.setattr(World, "_ranks", lambda world: None)  # none is started
    world = World(2, **options)
    assert world.transport == transport
    assert ("through shared memory (shm)" in repr(world)) == (transport == "shm")


@pytest.mark.parametrize("options", [{}, {"backend": "gloo"}, {"link": Link(gbps=1000)}], ids=str)
def test_the_picked_transport_carries_everything_and_is_recorded(options: dict) -> None:
    with World(2, **options) as world, record() as trace:
        assert world.run(transports) == [{world.transport}] * 2
    assert trace.about["transport"] == world.transport == ("gloo" if options else "shm")
    comms = [event for rank in trace.ranks.values() for event in rank.comms]
    assert {event.transport for event in comms} == {world.transport}


def test_a_transport_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raises("cannot model a link", World, 2, transport="shm", link=Link(gbps=1))
    raises("transport='rdma': choose", World, 2, transport="rdma")
    raises("this world has nccl", pick_transport, 2, NCCL, "gloo", None, None)
    monkeypatch.setenv("LABKIT_TRANSPORT", "rdma")
    raises("LABKIT_TRANSPORT='rdma': choose", World, 2)


def test_gpus_move_their_tensors_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_TRANSPORT", "shm")
    assert pick_transport(2, NCCL, None, None, None) == ("nccl", "")
    monkeypatch.setenv("LABKIT_TRANSPORT", "")
    shared_gpu = Pick("gloo", "cuda", "2 ranks share 1 GPU")
    assert pick_transport(2, shared_gpu, None, None, None) == ("gloo", "")


@cases((134_217_728, 8, "shm"), (134_217_727, 1, "gloo"), (134_217_728, 9, "gloo"))
def test_shared_memory_is_picked_where_there_is_room(
    free_bytes: int, ranks: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(folder: Path) -> SimpleNamespace:
        assert folder == MEMORY
        return SimpleNamespace(free=free_bytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(os, "access", lambda *_: True)
    picked, why_not = pick_transport(ranks, Pick("gloo", "cpu", "no GPU"), None, None, None)
    assert picked == transport
    assert bool(why_not) == (transport == "gloo")


def test_a_world_without_shared_memory_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MEMORY", Path("/nowhere"))
    with World(2) as world:
        assert world.transport == "gloo"
        assert world.picked.endswith("; no shared memory: there is no /nowhere")
