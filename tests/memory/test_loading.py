"""Weights in CPU memory: all ways to run compute the same, hold what they promise, and overlap.
Blocks that wait for the bus prove the overlap; no time is asserted."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit import plot, predict
from labkit.memory import loading
from labkit.memory.buffers import ALIGNED_BYTES
from labkit.memory.bus import Arrival, Bus, StreamBus
from labkit.memory.loading import (
    Packed,
    Run,
    Waiting,
    load_then_run,
    on_device,
    run_in_place,
    run_pipelined,
)
from labkit.memory.peak import PeakMemory
from labkit.models import GPT
from labkit.replaying import Compute, Issue, Wait, run
from laws import broken_laws
from small_models import Custom
from tables import raises, refusals
from test_bus import LIMIT_S

WAYS: dict[str, Callable[[Waiting, Tensor], Run]] = {
    "load, then run": load_then_run,
    "one after the other": partial(run_pipelined, ahead=0),
    "pipelined": run_pipelined,
    "three ahead": partial(run_pipelined, ahead=3),
    "more ahead than there are": partial(run_pipelined, ahead=9),
    "in place": run_in_place,
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def blocks(sizes: tuple[int, ...] = (8, 24, 16, 8, 40)) -> list[nn.Module]:
    """Of different size, so that a mix-up of buffers or places shows."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, n), nn.GELU(), nn.Linear(n, 6)) for n in sizes]


def plain(modules: list[nn.Module], x: Tensor) -> Tensor:
    with torch.no_grad():
        for one in modules:
            x = one(x)
    return x


@each_way
@pytest.mark.parametrize("gbps", [None, 0.02])
def test_every_way_computes_the_same(way: Any, gbps: float | None):
    modules, x = blocks(), torch.randn(3, 6)
    right = plain(modules, x)
    bus = Bus(gbps=gbps) if gbps else Bus()
    for _ in range(2):
        found = way(Waiting(modules, bus), x)
        assert torch.equal(found.value, right)
        assert not found.value.requires_grad


@each_way
def test_a_gpt_runs_without_its_weights_on_the_device(way: Any):
    model = GPT.preset("tiny", tied=False)
    tokens = torch.randint(256, (2, 16))
    parts = [model.embed, *model.blocks, nn.Sequential(model.norm, model.head)]
    with torch.no_grad():
        right = model(tokens)
    with torch.inference_mode():
        assert torch.equal(way(Waiting(parts, Bus()), tokens).value, right)
    model(tokens).sum().backward()  # the modules go on working
    assert model.head.weight.grad is not None


def test_bytes_held_and_moved_are_as_predicted():
    waiting = Waiting(blocks(), Bus())
    largest, every = max(waiting.nbytes), sum(waiting.nbytes)
    held = {"load, then run": every, "one after the other": largest, "pipelined": 2 * largest}
    held |= {"three ahead": 4 * largest, "more ahead than there are": every, "in place": 0}
    for name, way in WAYS.items():
        found = way(waiting, torch.randn(3, 6))
        assert (found.held_bytes, found.moved_bytes) == (held[name], every), name


@pytest.mark.parametrize("name", WAYS)
def test_no_other_memory_is_taken_for_weights(name: str):
    waiting, x = Waiting(blocks((512,) * 6), Bus()), torch.randn(1, 6)
    WAYS[name](waiting, x)
    with PeakMemory() as memory:
        found = WAYS[name](waiting, x)
    assert 0 <= memory.peak_bytes - found.held_bytes < 16_000  # activations: 512 numbers, some


class Watched(Bus):
    """Of five loads, which have begun and which have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.moments = {(x, k): threading.Event() for x in ("began", "ended") for k in range(5)}

    def _carry(self, event: Any, *args: Any) -> None:
        self.moments["began", event.seq].set()
        super()._carry(event, *args)
        self.moments["ended", event.seq].set()


def patient_run(
    way: Callable[[Waiting, Tensor], Run], until: str, later: int = 0, limit_s: float = LIMIT_S
) -> tuple[bool, bool]:
    """Blocks wait until the bus began or ended a later load: was it overdue, is the sum right?"""
    bus, arrived = Watched(), []

    def block(k: int) -> nn.Module:
        def forward(self: Any, x: Tensor) -> Tensor:
            if load := bus.moments.get((until, k + 1 + later)):
                arrived.append(load.wait(limit_s))
            return x + self.weight.mean()

        return Custom(forward, weight=nn.Parameter(torch.full((100,), 2.0 + k)))

    result = way(Waiting([block(k) for k in range(5)], bus), torch.zeros(()))
    assert len(arrived) == 4 - later
    return not all(arrived), result.value.item() == sum(2.0 + k for k in range(5))


def test_as_many_blocks_as_asked_for_are_loaded_while_one_computes_and_no_more() -> None:
    for until in ("began", "ended"):
        assert patient_run(run_pipelined, until) == (False, True)
    assert patient_run(partial(run_pipelined, ahead=3), "ended", later=2) == (False, True)
    overdue, right = patient_run(run_pipelined, "began", later=1, limit_s=0.05)
    assert overdue and right


begin, under_test = loading._Runner.__init__, SimpleNamespace(pipelined=run_pipelined)
FAULTS = {
    "one buffer too few": (
        loading._Runner,
        "__init__",
        lambda self, waiting, n: begin(self, waiting, max(1, n - 1)),
    ),
    "nobody waits": (Arrival, "wait", lambda self: None),
    "loads when needed": (under_test, "pipelined", partial(run_pipelined, ahead=0)),
    "always the same buffer": (loading._Runner, "_buffer", lambda self, k: self.buffers[0]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_a_proof_red(fault: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*FAULTS[fault])
    overdue, right = patient_run(under_test.pipelined, "ended", limit_s=0.1)
    slow = Waiting(blocks(), Bus(gbps=1e-4))  # 0.4 s in all: who does not wait reads too early
    x = torch.randn(3, 6)
    same = torch.equal(under_test.pipelined(slow, x).value, plain(slow.blocks, x))
    assert overdue or not right or not same


def test_packed_weights_are_the_modules_own():
    (block,) = blocks((8,))
    before = {name: x.detach().clone() for name, x in block.named_parameters()}
    packed = Packed(block)
    for name, x in block.named_parameters():
        assert torch.equal(x, before[name])
        assert x.untyped_storage().data_ptr() == packed.flat.untyped_storage().data_ptr()
        assert packed.places[name][0].start % ALIGNED_BYTES == 0
    packed.flat.zero_()
    assert not any(x.any() for x in block.parameters())


def test_dtypes_buffers_and_ties_inside_a_block_are_kept():
    a, b = (nn.Linear(3, 3).to(torch.bfloat16) for _ in range(2))
    b.weight = a.weight
    empty, x = nn.Parameter(torch.zeros(0, 4)), torch.ones(3, dtype=torch.bfloat16)
    block = Custom(lambda self, x: self.b(self.a(x)) * self.count, a=a, b=b, empty=empty)
    block.register_buffer("count", torch.tensor(7))
    right = plain([block], x)
    waiting = Waiting([block], Bus())
    assert block.a.weight is block.b.weight
    for way in WAYS.values():
        assert torch.equal(way(waiting, x).value, right)


@each_way
def test_a_run_records_its_events(way: Any):
    result = way(Waiting(blocks(), Bus(gbps=0.1)), torch.randn(3, 6))
    trace = result.trace
    assert broken_laws(trace) == []
    (rank,) = trace.ranks.values()
    assert [x.module for x in rank.spans] == [f"block {k}" for k in range(5)]
    assert [x.op for x in rank.comms] == ["read" if way is run_in_place else "load"] * 5
    assert sum(x.bus_bytes for x in rank.comms) == result.moved_bytes
    assert trace.about["link"] == {"gbps": 0.1}
    assert "paced to 0.1 Gbit/s" in plot.timeline(trace).axes[0].get_title(loc="left")
    assert all(x.wait_ended_s for x in rank.comms), "each was waited for"
    for load, span in zip(rank.comms, rank.spans, strict=True):
        if way is run_in_place:
            assert span.began_s <= load.began_s and load.ended_s <= span.ended_s
        else:
            assert load.ended_s <= span.began_s, "no block begins before its weights are there"
    if way is load_then_run:
        assert rank.comms[-1].ended_s <= rank.spans[0].began_s, "nor before all are there"


def test_weights_that_cannot_wait_are_refused():
    one, other = blocks((8, 8))
    other[0].weight = one[0].weight
    raises("blocks 0 and 1 share a weight", Waiting, [one, other], Bus())
    with pytest.raises(ValueError, match="weight is on meta, but must be in CPU memory"):
        Waiting([nn.Linear(2, 2, device="meta")], Bus())
    raises("there is no block to run", load_then_run, Waiting([], Bus()), torch.ones(1))
    with pytest.raises(ValueError, match="ahead=-1: choose 0 or more blocks"):
        run_pipelined(Waiting(blocks(), Bus()), torch.ones(6), ahead=-1)


LOADS = ([2.0] * 5, [1.0, 4.0, 2.0, 7.0, 1.0])
COMPUTES = ([3.0] * 5, [1.0] * 5, [5.0, 1.0, 3.0, 1.0, 6.0])


@pytest.mark.parametrize("load_s", LOADS)
@pytest.mark.parametrize("compute_s", COMPUTES)
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_the_pipelined_time_is_the_replayed_one(load_s: Any, compute_s: Any, ahead: int):
    program: list[Compute | Issue | Wait] = []
    asked = 0
    for k, seconds in enumerate(compute_s):
        while asked <= min(k + ahead, 4):
            program.append(Issue(asked, (0,), load_s[asked]))
            asked += 1
        program += [Wait(k), Compute(seconds)]
    found = predict.pipelined_loading_s(load_s, compute_s, ahead)
    assert found == run({0: program})[0][-1].ended_s
    assert found <= predict.load_then_run_s(load_s, compute_s) == sum(load_s) + sum(compute_s)


def test_blocks_alike_have_a_closed_formula():
    for load, compute in ((2.0, 3.0), (3.0, 2.0), (0.0, 1.0), (1.0, 0.0)):
        right = load + 4 * max(load, compute) + compute
        assert predict.pipelined_loading_s([load] * 5, [compute] * 5) == right
    assert predict.in_place_s([2.0] * 5, [3.0] * 5, reads=2) == 20.0


test_a_formula_refuses_what_cannot_be = refusals(
    lambda wrong: wrong(),
    (lambda: predict.load_then_run_s([1.0], []), "load_s has 1 blocks, compute_s 0"),
    (lambda: predict.pipelined_loading_s([], []), "pass both times for each block"),
    (lambda: predict.pipelined_loading_s([1.0], [1.0], ahead=0), "ahead=0: choose a whole"),
    (lambda: predict.in_place_s([-1.0], [1.0]), "load_s=-1.0: choose 0 or more"),
    (lambda: predict.in_place_s([1.0], [1.0], reads=0), "reads=0: choose a whole"),
)


@pytest.mark.gpu
@each_way
def test_every_way_computes_the_same_on_a_gpu(way: Any):
    modules, x = blocks((8, 24, 16, 8, 4096)), torch.randn(3, 6, device="cuda")
    right = plain([copy.deepcopy(module).cuda() for module in modules], x)
    result = way(Waiting(modules, StreamBus()), x)
    assert torch.equal(result.value, right)
    assert all(span.ended_s for span in result.computed)


@pytest.mark.gpu
def test_a_gpu_holds_as_many_blocks_as_it_says():
    waiting = Waiting(blocks((1 << 16,) * 6), StreamBus())
    x = torch.randn(1, 6, device="cuda")
    for way in WAYS.values():
        way(waiting, x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = way(waiting, x)
        taken = torch.cuda.max_memory_allocated() - before
        assert 0 <= taken - found.held_bytes < 8 << 20  # activations, and what blocks round up to


@pytest.mark.gpu
def test_a_gpu_reads_pinned_memory_where_it_is():
    flat = torch.arange(1000, dtype=torch.uint8).pin_memory()
    there = on_device(flat, torch.device("cuda"))
    assert there.is_cuda and there.data_ptr() == flat.data_ptr()
    assert torch.equal(there.cpu(), flat)
    with pytest.raises(ValueError, match="GPUs can only read pinned CPU memory"):
        on_device(torch.zeros(4, dtype=torch.uint8), torch.device("cuda"))
