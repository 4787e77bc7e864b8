"""The contract of `World`: what a run gives back, what the ranks keep, what they print, what is
refused. How runs fail is in test_failures.py."""

import marshal
import os
import platform
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from types import CodeType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

import labkit
import labkit.comm
from command import python
from labkit import Comm, Link, RankError, World
from labkit.runtime import cells, pickling
from labkit.runtime import output as output_module
from labkit.runtime.output import RankOutput
from labkit.runtime.pick import MAX_RANKS, Pick, pick
from labkit.runtime.transports.native import Native
from places import SUPPORT
from provoke import alive, gone, ranks_of_servers, servers, until
from tables import cases, raises
from worlds import on_each_rank

FACTOR = 3


def of_this_module(x: int) -> int:
    return FACTOR * x + Comm().rank


class OfThisModule:
    def __init__(self, value: int):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfThisModule) and other.value == self.value

    def method(self) -> int:
        return self.value + Comm().rank


def pids_of(world: World) -> list[int]:
    return world.run(os.getpid)


def sum_of_ranks() -> float:
    x = torch.tensor([float(Comm().rank + 1)])
    Comm().all_reduce(x)
    return x.item()


def hold(folder: Path) -> None:
    """A rank shows that it has begun, and stays until it may go."""
    (folder / "began").touch()
    until((folder / "go").exists, 60)


Printed = Callable[[], str]


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For worlds, and not for their server, which is there before."""
    World(1).close()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


# ---- values


def test_arguments_reach_every_rank(world4: World) -> None:
    def given(a: int, *rest: int, key: str, **others: int) -> tuple[object, ...]:
        return a, rest, key, others

    assert world4.run(given, 1, 2, 3, key="k", fn=4) == [(1, (2, 3), "k", {"fn": 4})] * 4


def test_functions_lambdas_closures_methods_and_partials_travel(world2: World) -> None:
    base = 10

    def closure(x: int) -> int:
        return base + x + Comm().rank

    assert world2.run(of_this_module, 5) == [15, 16]
    assert world2.run(lambda x: closure(x) + 1, 5) == [16, 17]
    assert world2.run(OfThisModule(7).method) == [7, 8]
    assert world2.run(partial(of_this_module, x=1)) == [3, 4]
    assert world2.run(len, "four") == [4, 4]


def test_classes_of_this_module_and_of_a_rank_come_back(world2: World) -> None:
    def make() -> tuple[object, object]:
        class Here:
            x = 5

        return OfThisModule(Comm().rank), Here()

    values = world2.run(make)
    assert [value for value, _ in values] == [OfThisModule(0), OfThisModule(1)]
    assert [here.x for _, here in values] == [5, 5]


def test_a_run_gets_copies_so_a_rank_cannot_change_the_drivers_objects(world2: World) -> None:
    given = {"list": [1], "tensor": torch.zeros(2)}

    def change(copy: dict) -> dict:
        copy["list"].append(2)
        copy["tensor"] += 1
        return copy

    returned = world2.run(change, given)
    assert given["list"] == [1] and given["tensor"].sum() == 0
    assert returned[0]["list"] == [1, 2] and returned[1]["tensor"].sum() == 2


@pytest.mark.slow
def test_200_megabytes_come_back_from_every_rank_and_go_there(world2: World) -> None:
    numel = 50_000_000
    values = world2.run(lambda: torch.full((numel,), float(Comm().rank)))
    assert [(len(x), x[0].item(), x[-1].item()) for x in values] == [(numel, 0, 0), (numel, 1, 1)]
    assert world2.run(lambda x: x[-1].item() + Comm().rank, values[1]) == [1.0, 2.0]


TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "not contiguous": torch.arange(12.0).view(3, 4).t()[1:],
    "expanded": torch.tensor([1.0]).expand(5),
    "view of a large one": torch.arange(1000)[10:13],
    "bfloat16": torch.arange(5, dtype=torch.bfloat16),
    "float16": torch.arange(5, dtype=torch.float16),
    "float8": torch.arange(5.0).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "float64": torch.rand(3, dtype=torch.float64),
    "uint8": torch.arange(3, dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_every_kind_of_tensor_travels_both_ways(world2: World, kind: str) -> None:
    x = TENSORS[kind]
    for back in world2.run(lambda y: y, x):
        assert back.dtype == x.dtype and back.shape == x.shape
        assert torch.equal(back.to(torch.complex128), x.to(torch.complex128))
        if back.numel():
            back.view(-1)[0] = 1  # it is ours to write to


def test_a_tensor_of_a_graph_comes_back_without_it(world2: World) -> None:
    def leaf_and_result() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = torch.ones(2, requires_grad=True)
        return leaf, leaf * 2

    leaf, result = world2.run(leaf_and_result)[0]
    assert leaf.requires_grad and leaf.is_leaf
    assert not result.requires_grad and result.tolist() == [2, 2]


def test_modules_travel_with_their_tied_weights(world2: World) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    back = world2.run(lambda m: m, module)[1]
    assert back[1].weight is back[0].weight
    assert torch.equal(back[0].weight, module[0].weight)


def test_other_tensors_travel_too(world2: World) -> None:
    array = np.arange(6.0).reshape(2, 3)
    given = torch.eye(3).to_sparse(), torch.empty(3, device="meta"), array
    for sparse, meta, copy in world2.run(lambda *given: given, *given):
        assert torch.equal(sparse.to_dense(), torch.eye(3))
        assert meta.is_meta and meta.shape == (3,)
        assert np.array_equal(copy, array)


# ---- what ranks keep


def test_cells_and_functions_share_the_state_of_a_rank_and_keep_it(world2: World) -> None:
    world2.run_cell("x = 10 * rank\ndef f(y):\n    return x + y", "<cell>")
    assert world2.run_cell("f(1)", "<next cell>") == [1, 11]
    assert world2.run(lambda: labkit.attach().state.x) == [0, 10]
    world2.run(lambda: setattr(labkit.attach().state, "x", [Comm().rank]))
    world2.run(lambda: labkit.attach().state.x.append(9))
    assert world2.run_cell("x, size, comm.rank", "<cell>") == [([0, 9], 2, 0), ([1, 9], 2, 1)]
    world2.run_cell("class Pair:\n    def __init__(self, x):\n        self.x = x", "<cell>")
    assert [pair.x for pair in world2.run_cell("Pair(rank)", "<cell>")] == [0, 1]


def test_a_cell_gives_its_last_expression_and_a_statement_gives_none(world2: World) -> None:
    assert world2.run_cell("a = 3\na + rank", "<cell>") == [3, 4]
    assert world2.run_cell("a = 3", "<cell>") == [None, None]
    assert world2.run_cell("", "<cell>") == [None, None]
    assert world2.run_cell("# nothing", "<cell>") == [None, None]


def test_ranks_are_the_same_processes_from_run_to_run(world4: World) -> None:
    pids = pids_of(world4)
    assert len(set(pids)) == 4 and os.getpid() not in pids
    assert pids_of(world4) == pids


def test_restart_gives_new_processes_without_state(world2: World) -> None:
    world2.run(lambda: setattr(labkit.attach().state, "x", 5))
    before = pids_of(world2)
    world2.restart()
    assert not set(before) & set(pids_of(world2))
    assert world2.run(lambda: hasattr(labkit.attach().state, "x")) == [False, False]
    assert gone(before)


def test_run_on_runs_on_these_ranks_in_this_order(world4: World) -> None:
    assert world4.run(lambda: Comm().rank) == [0, 1, 2, 3]
    assert world4.run_on([2, 0], lambda: Comm().rank) == [2, 0]
    assert world4.run_on(range(1, 3), lambda: Comm().rank) == [1, 2]
    assert world4.run_on([], lambda: Comm().rank) == []
    assert world4.run_cell("rank", "<cell>", ranks=[3]) == [3]


# ---- communication


@on_each_rank("world4")
def test_plain_torch_distributed_works_on_the_same_default_group() -> None:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    assert x.item() == sum_of_ranks() == 10.0
    gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())]))
    assert [x.item() for x in gathered] == [0, 1, 2, 3]
    half = dist.new_group([0, 1])
    dist.barrier()
    assert dist.get_rank() >= 2 or Comm(half).size == 2


def test_many_ranks_on_few_cores() -> None:
    with World(12) as world:
        assert world.run(sum_of_ranks) == [78.0] * 12


def test_two_worlds_live_side_by_side(world2: World) -> None:
    with World(2) as older, World(3) as younger:
        assert older.run(sum_of_ranks) == world2.run(sum_of_ranks) == [3.0] * 2
        assert younger.run(sum_of_ranks) == [6.0] * 3
        assert not set(pids_of(older)) & set(pids_of(younger))
        older.close()
        assert younger.run(sum_of_ranks) == [6.0] * 3
    assert world2.run(sum_of_ranks) == [3.0] * 2


@pytest.mark.slow
def test_worlds_of_several_threads_do_not_disturb_each_other() -> None:
    def live(size: int) -> None:
        for _ in range(4):
            with World(size) as world:
                for _ in range(5):
                    assert world.run(sum_of_ranks) == [size * (size + 1) / 2] * size
                raises("ZeroDivisionError", world.run, lambda: 1 // 0, error=RankError)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(live, (1, 2, 3)))


def test_one_world_runs_one_function_at_a_time(world2: World, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(world2.run, hold, tmp_path)
        assert until((tmp_path / "began").exists)
        raises("another thread", world2.run, lambda: 1, error=RuntimeError)
        (tmp_path / "go").touch()
        assert running.result() == [None, None]
    assert world2.run(lambda: 1) == [1, 1]


@pytest.mark.parametrize("how", ["close", "restart"])
def test_closing_from_another_thread_ends_a_run(how: str, tmp_path: Path) -> None:
    with World(2) as world, ThreadPoolExecutor(1) as pool:
        running = pool.submit(world.run, hold, tmp_path)
        assert until((tmp_path / "began").exists)
        getattr(world, how)()
        assert raises("", running.result, 30, error=RankError).kind == "interrupted"
        if how == "restart":
            assert world.run(lambda: 1) == [1, 1]


# ---- what a world is made with


def test_same_seed_on_every_rank_and_the_one_that_is_asked_for() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    with World(2) as world, World(2) as same:
        first = world.run(draw)
        world.restart()
        assert first[0] == first[1] and world.run(draw) == first == same.run(draw)
    with World(1, seed=1) as other:
        assert all(x != y for x, y in zip(other.run(draw)[0], first[0]))


def test_a_world_of_one_is_the_same_code_and_threads_are_torchs(world2: World) -> None:
    assert world2.run(torch.get_num_threads) == [1, 1]
    with World(1, threads=2, backend="gloo", device="cpu") as world:
        assert world.run(torch.get_num_threads) == [2] and world.run(sum_of_ranks) == [1.0]
        assert "1 rank" in world.picked and "as asked" in world.picked


def test_a_modelled_wire_is_gloos_where_nccl_could_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert pick(4, None, None) == Pick("nccl", "cuda", "4 GPUs, one for each rank")
    monkeypatch.setenv("LABKIT_BACKEND", "nccl")
    paced = pick(4, None, None, paced=True)
    assert (paced.backend, paced.device) == ("gloo", "cuda") and "paced" in paced.why
    raises("cannot model a link", pick, 4, "nccl", None, paced=True)


def test_variables_choose_what_no_argument_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)

    def picked(backend: str, device: str, *arguments: str | None) -> tuple[str, str]:
        with patch.dict(os.environ, LABKIT_BACKEND=backend, LABKIT_DEVICE=device):
            chosen = pick(2, *(arguments or (None, None)))
        return chosen.backend, chosen.device

    assert picked("", "") == picked("nccl", "") == picked("gloo", "cpu", "nccl", "cuda")
    assert picked("", "cpu") == picked("gloo", "") == picked("nccl", "cuda", "gloo", "cpu")
    assert picked("gloo", "cuda") == picked("gloo", "", None, "cuda") == ("gloo", "cuda")
    raises("LABKIT_DEVICE='tpu': choose cpu or cuda", picked, "", "tpu")
    raises("device=.cpu.; .* unset LABKIT_BACKEND or LABKIT_DEVICE", picked, "nccl", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    raises('LABKIT_DEVICE="cuda": torch finds no GPU', picked, "", "cuda")


def test_code_keeps_its_file_where_cloudpickle_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_file(code: CodeType) -> Any:
        return marshal.loads, (marshal.dumps(code.replace(co_filename="")),)

    monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, CodeType, without_file)
    cells.run("def outer():\n    return lambda: 1 / 0", "7.py", names := {"__name__": "__main__"})
    for function in (names["outer"], names["outer"]()):
        code = pickling.unpack(pickling.dumps(function, "it")).__code__
        assert (code.co_filename, code.co_firstlineno) == ("7.py", function.__code__.co_firstlineno)


@on_each_rank("world2")
def test_gloo_that_lacks_an_all_to_all_of_lists_has_one_of_flat_buffers() -> None:
    me, error = Comm().rank, RuntimeError("Backend gloo does not support alltoall")
    ins = [torch.full((me + 1, peer + 1), 10 * me + peer) for peer in range(2)]
    outs = [torch.empty(peer + 1, me + 1, dtype=torch.int64) for peer in range(2)]
    with patch.object(dist, "all_to_all", side_effect=error):
        Native(Comm().group, "gloo").all_to_all(outs, ins, None).wait()
    assert [out.unique().tolist() for out in outs] == [[me], [10 + me]]


def test_a_barrier_of_nccl_is_on_the_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "barrier", lambda *args, **options: options["device_ids"])
    native, gpu = SimpleNamespace(group=None), torch.device("cuda", 3)
    assert Native.barrier(native, SimpleNamespace(is_cuda=True, device=gpu), None) == [3]


def test_picked_says_what_and_why(world2: World) -> None:
    assert "2 ranks" in world2.picked and world2.backend in world2.picked
    assert world2.picked.split(": ", 1)[1]
    assert world2.picked in repr(world2)


@pytest.mark.slow
def test_spawned_ranks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_TRANSPORT", raising=False)
    with World(2, start="spawn") as world:
        assert world.transport == "shm" and world.run(of_this_module, 5) == [15, 16]
        assert world.run(sum_of_ranks) == [3.0, 3.0]
        pids = world.run(lambda: subprocess.Popen(["sleep", "600"]).pid) + pids_of(world)
        fault = "rank 1 raised ZeroDivisionError"
        raises(fault, world.run, lambda: 1 // (1 - Comm().rank), error=RankError)
        assert world.run(sum_of_ranks) == [3.0, 3.0]
        with pytest.raises(RankError, match="SIGKILL") as info:
            world.run(lambda: os.kill(os.getpid(), 9) if Comm().rank else sum_of_ranks())
        assert info.value.kind == "died" and info.value.ranks == (1,)
        assert world.run(sum_of_ranks) == [3.0, 3.0]
        pids += pids_of(world)
    assert gone(pids), "and what they have started"


def test_options_reach_the_ranks() -> None:
    def seen() -> tuple[object, ...]:
        me, here = labkit.attach(), labkit.comm.here
        return me.rank, me.size, here.link, here.board, sum_of_ranks()

    link = Link(gbps=5)
    with World(2, link=link, check=False) as world:
        assert world.run(seen) == [(0, 2, link, None, 3.0), (1, 2, link, None, 3.0)]


def test_ranks_see_the_folder_environment_and_modules_of_the_driver_at_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab_module_of_test.py").write_text("def f():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lab_module_of_test  # type: ignore[import-not-found]

    monkeypatch.setenv("LABKIT_TEST_GONE", "1")
    World(1).close()  # the server has seen it
    monkeypatch.delenv("LABKIT_TEST_GONE")
    monkeypatch.setenv("LABKIT_TEST_NEW", "ü")
    monkeypatch.chdir(tmp_path)
    with World(2, timeout_s=float("inf")) as world:
        names = ["LABKIT_TEST_NEW", "LABKIT_TEST_GONE"]
        seen = world.run(lambda: (os.getcwd(), *map(os.environ.get, names)))
        assert seen == [(str(tmp_path), "ü", None)] * 2
        assert world.run(lab_module_of_test.f) == [42, 42]
        assert world.run(sum_of_ranks) == [3.0, 3.0], "with an infinite timeout"


# ---- what is refused


@cases(
    ({"size": 0}, ValueError, "at least 1 rank"),
    ({"size": -2}, ValueError, "at least 1 rank"),
    ({"size": 10_000}, ValueError, "10,000 ranks are too many for this machine.*choose up to"),
    ({"size": MAX_RANKS + 1}, ValueError, "too many"),
    *[({"size": size}, TypeError, "an integer") for size in (True, "4", 2.0, None)],
    ({"backend": "mpi"}, ValueError, "gloo"),
    ({"device": "tpu"}, ValueError, "cuda"),
    ({"timeout_s": 0}, ValueError, "more than 0"),
    ({"timeout_s": float("nan")}, ValueError, "more than 0"),
    ({"threads": 0}, ValueError, "at least 1 thread"),
    ({"start": "teleport"}, ValueError, "spawn"),
    ({"backend": "nccl", "device": "cpu"}, ValueError, "gloo"),
)
def test_wrong_arguments_are_refused_with_a_way_out(wrong: dict, error: Any, says: str) -> None:
    raises(says, World, error=error, **{"size": 2, **wrong})


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    raises("no GPU", World, 2, device="cuda")
    raises("needs a GPU for each of the 2 ranks, but there are 0", World, 2, backend="nccl")


def test_a_closed_world_says_so() -> None:
    world = World(1)
    world.close()
    world.close()
    assert "closed" in repr(world)
    raises("closed.*create a new World", world.run, lambda: 1, error=RuntimeError)
    raises("create a new World", world.restart, error=RuntimeError)


def test_what_cannot_run_is_refused_and_the_world_goes_on(world2: World) -> None:
    pids = pids_of(world2)
    raises("pass a function", world2.run, 42, error=TypeError)
    raises("rank 2 is not in this world; choose 0 to 1", world2.run_on, [0, 2], lambda: 1)
    raises("rank -1 is not", world2.run_on, [-1], lambda: 1)
    raises("rank '0' is not", world2.run_on, "0", lambda: 1)
    raises("each rank once", world2.run_on, [1, 1], lambda: 1)
    assert pids_of(world2) == pids
    inside = "(?s)inside a rank.*Comm.*subgroup"
    raises(inside, world2.run, lambda: World(2), error=RankError)


def test_a_failed_start_is_reported_and_leaves_nothing(temporary_folder: Path) -> None:
    server, ranks = servers(), ranks_of_servers()
    raises("(?s)rank . could not start.*Overflow", World, 2, seed=2**70, error=RankError)
    with patch.object(os, "getcwd", lambda: "/no/such/folder"):
        lost = "(?s)rank . could not start.*FileNotFoundError.*no/such"
        raises(lost, World, 2, error=RankError)
    assert not os.listdir(temporary_folder)
    assert servers() == server and ranks_of_servers() == ranks


# ---- what stays behind, and what listens


@pytest.mark.slow
def test_nothing_listens_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # what a cluster's user may have set

    def open_all_sorts() -> int:
        Comm().subgroup([0, 1])
        sum_of_ranks()
        dist.new_group([0, 2])
        dist.barrier()
        return os.getpid()

    with World(3) as forked, World(2, start="spawn") as spawned:
        pids = [*forked.run(open_all_sorts), *spawned.run(os.getpid)]
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        assert set(pids) <= {process.pid for process in family}
        for process in family:
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip in ("127.0.0.1", "::1"), (process, connection)


def test_closing_leaves_no_rank_folder_or_file_and_no_child_of_a_rank(
    temporary_folder: Path,
) -> None:
    files = psutil.Process().num_fds()
    with World(3) as world:
        pids = pids_of(world) + world.run(lambda: subprocess.Popen(["sleep", "600"]).pid)
        assert all(map(alive, pids)) and os.listdir(temporary_folder)
    assert gone(pids)
    assert not os.listdir(temporary_folder)
    assert psutil.Process().num_fds() == files


def test_a_world_that_is_dropped_ends_its_ranks(temporary_folder: Path) -> None:
    world = World(2)
    pids = pids_of(world)
    world = World(2)  # as a notebook's cell does that is run again
    assert gone(pids)
    assert len(os.listdir(temporary_folder)) == 1
    world.close()


def test_a_fork_made_by_a_function_does_not_delete_at_end_its_rank(world2: World) -> None:
    assert world2.run(lambda: "parent" if os.fork() else "child") == ["parent", "parent"]
    assert world2.run(lambda: Comm().rank) == [0, 1]


@pytest.mark.slow
def test_the_same_function_runs_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        f"""
import sys
sys.path += {[str(Path(__file__).parent), str(SUPPORT)]}
import labkit
from tables import raises
from test_world import sum_of_ranks

me = labkit.attach()
me.state.x = me.rank
raises("inside a rank", labkit.World, 2, error=RuntimeError)
print(f"SAID {{me.rank}} {{me.size}} {{sum_of_ranks()}}\\n", end="", flush=True)
"""
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--rdzv-backend", "c10d")
    done = python(*run, "--rdzv-endpoint", "localhost:0", job)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("SAID"))
    assert said == ["SAID 0 2 3.0", "SAID 1 2 3.0"]
    assert "Warning" not in done.stderr.replace("OMP_NUM_THREADS", "")


# ---- output


def test_what_ranks_print_is_marked_by_rank(world2: World, printed: Printed) -> None:
    def speak() -> None:
        print("first\nsecond")
        print("to stderr", file=sys.stderr)
        os.write(1, b"from C\n")
        print("no end of line", end="")

    world2.run(speak)
    lines = printed().splitlines()
    texts = ("first", "second", "to stderr", "from C", "no end of line")
    for rank in (0, 1):
        of_rank = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert of_rank == [f"[rank {rank}] {text}" for text in texts]
    assert len(lines) == 10


def test_output_comes_while_the_ranks_run(
    world2: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def speak(file: Path) -> None:
        print("early")
        until(file.exists)
        print("late")

    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    thread = threading.Thread(target=world2.run, args=(speak, tmp_path / "go"))
    thread.start()
    assert until(lambda: stream.seen.count("] early\n") == 2)
    (tmp_path / "go").touch()
    thread.join()
    assert stream.seen.count("] late\n") == 2


def test_a_flood_of_output_neither_hangs_nor_loses_a_line(world4: World, printed: Printed) -> None:
    def flood() -> int:
        line = "x" * 99 + "\n"
        for _ in range(1000):
            sys.stdout.write(line * 100)
        return Comm().rank

    assert world4.run(flood) == [0, 1, 2, 3]
    lines = printed().splitlines()
    assert len(lines) == 4 * 100_000
    assert {len(line) for line in lines} == {99 + len("[rank 0] ")}


def test_unterminated_lines_and_bad_bytes_are_shown(world2: World, printed: Printed) -> None:
    def odd() -> None:
        os.write(1, b"\xff\xfe valid \xc3\n")
        print("\udc80 surrogate, \x00 zero")
        sys.stdout.write("y" * 10_000_000)

    world2.run(odd)
    out = printed()
    assert out.count(" valid ") == 2 and out.count("zero") == 2
    assert out.count("y") == 20_000_000


def test_a_thread_of_a_rank_that_prints_on_and_on_does_not_hold_a_run_up(world2: World) -> None:
    def leave_a_thread_printing() -> str:
        def chatter() -> None:
            while True:
                print("chatter")

        threading.Thread(target=chatter, daemon=True).start()
        return "done"

    assert world2.run(leave_a_thread_printing) == ["done", "done"]
    assert world2.run(lambda: Comm().rank) == [0, 1]
    world2.restart()


@pytest.mark.parametrize("what", ["sys.stdout.close()", "sys.stderr.close()", "sys.stdout = None"])
def test_a_function_may_close_its_streams(world2: World, what: str, printed: Printed) -> None:
    assert world2.run_cell(f"import sys\n{what}\nrank", "<cell>") == [0, 1]
    world2.run(lambda: print("heard"))
    assert sorted(printed().splitlines()) == ["[rank 0] heard", "[rank 1] heard"]


def test_output_of_an_earlier_thread_comes_with_the_next(world2: World, printed: Printed) -> None:
    def later(begun: threading.Event | None = None) -> None:
        timer = threading.Timer(0.05, print, ["from a thread"])
        timer.start()
        labkit.attach().state.timer = timer

    world2.run(later)
    world2.run(lambda: labkit.attach().state.timer.join())
    assert printed().count("from a thread") == 2


class Terminal:
    """A stream that collects what is written to it."""

    def __init__(self, tty: bool = False, encoding: str = "utf-8"):
        self.text = self.seen = ""  # written, and flushed
        self._tty, self.encoding = tty, encoding

    def write(self, text: str) -> None:
        text.encode(self.encoding)
        self.text += text

    def flush(self) -> None:
        self.seen = self.text

    def isatty(self) -> bool:
        return self._tty


BAR = [(0, b"\r 10%"), (0, b"\r 50%\r"), (0, b" 90%"), (0, b"\r100%\n")]


@cases(
    ([(0, b"caf\xc3"), (1, b"other\n"), (0, b"\xa9 au"), (0, b" lait\n")], {},
     "[rank 1] other\n[rank 0] café au lait\n"),
    (BAR, {}, "[rank 0] 100%\n"),
    (BAR[:-1], {}, "[rank 0]  90%\n"),
    ([(0, b"windows\r"), (0, b"\nline\r\n")], {}, "[rank 0] windows\n[rank 0] line\n"),
    ([(2, b"\r 10%"), (2, b"\r 50%"), (2, b"\n")], {"tty": True},
     "\r\x1b[K[rank 2]  10%\r\x1b[K[rank 2]  50%\r\x1b[K[rank 2]  50%\n"),
    ([(0, "█ café\n".encode())], {"encoding": "ascii"}, "[rank 0] ? caf?\n"),
    ids=["pieces", "bar", "open bar", "ends of Windows", "terminal", "smaller alphabet"],
)  # fmt: skip
def test_lines_and_bars_are_shown_as_they_were_meant(
    pieces: list[tuple[int, bytes]], terminal: dict, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal(**terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    output = RankOutput(3)
    for rank, data in pieces:
        output.feed(rank, data)
    output.close()
    assert stream.text == expected


def test_a_long_bar_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    output = RankOutput(1)
    for step in range(10_000):
        output.feed(0, f"\rstep {step}".encode())
    assert len(output._open[0]) < 100


class Page:
    """A notebook's output that is drawn anew."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def __call__(self, bundle: dict[str, str], **_: object) -> "Page":
        self.drawn.append(bundle["text/plain"])
        return self

    update = __call__


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    monkeypatch.setattr("IPython.display.display", page)
    monkeypatch.setattr(output_module, "in_notebook", lambda: True)
    return page


def test_a_notebook_shows_bars_and_lines_while_they_come(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = RankOutput(2)
    output.feed(0, b"begin\n")
    output.feed(1, b"\r 10%")
    monkeypatch.setattr(output_module, "REDRAW_S", 0.0)
    output.refresh()
    assert page.drawn[-1] == "[rank 0] begin\n[rank 1]  10%"
    drawings = len(page.drawn)
    output.refresh()
    assert len(page.drawn) == drawings, "nothing new, nothing drawn"
    output.feed(1, b"\r 20%")
    assert page.drawn[-1] == "[rank 0] begin\n[rank 1]  20%"
    output.feed(1, b"\n")
    output.feed(0, b"end\n")
    output.close()
    assert page.drawn[-1] == "[rank 0] begin\n[rank 0] end\n[rank 1]  20%", "grouped by rank"


def test_a_flood_is_cut_in_a_notebook(page: Page) -> None:
    output = RankOutput(1)
    output.feed(0, "".join(f"line {k}\n" for k in range(100_000)).encode())
    output.feed(0, b"z" * 1_000_000 + b"\n")
    output.close()
    lines = page.drawn[-1].splitlines()
    assert len(lines) == output_module.MAX_LINES + 1
    assert lines[0] == "[rank 0] line 0" and "lines left out" in page.drawn[-1]
    assert len(lines[-1]) < 3000 and "more characters" in lines[-1]


def test_rank_0_shows_the_progress_of_all(world2: World, printed: Printed) -> None:
    def work() -> int:
        for _ in labkit.progress(range(8), "train"):
            time.sleep(0.1)
        return 1

    assert world2.run(work) == [1, 1]
    lines = printed().splitlines()
    assert len(lines) == 1 and lines[0].startswith("[rank 0] train") and "8/8" in lines[0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_a_rank_keeps_the_memory_that_a_step_has_freed(world2: World) -> None:
    """Else every step asks the system for it again, page by page."""

    def pages_of_a_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.ones(1 << 20) for _ in range(16)]  # 4 MiB each
        del activations
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first, *later = [world2.run(pages_of_a_step) for _ in range(8)]
    assert all(page_count > 10_000 for page_count in first)
    # The median of each rank: other work of the process may fall into a step.
    assert all(median(counts) < 1000 for counts in zip(*later, strict=True))


def test_later_ranks_have_what_an_optimizer_imports() -> None:
    """The server imports it when it has nothing else to do, so that no rank has to."""

    def has_it() -> bool:
        time.sleep(0.6)  # in which the server may import
        with World(1) as world:
            return world.run(lambda: "torch._dynamo" in sys.modules) == [True]

    assert until(has_it, 60)
