"""Ways to move a tensor: parts, predicted time, values; a held bus shows who waits."""

import threading
from typing import Any

import pytest
import torch

from labkit.memory import timing
from labkit.memory.bus import Bus
from labkit.memory.timing import Buffers, Measured, Rig, measure, rates_of
from labkit.memory.transfers import PACED, Part, Rates, Transfer, short, ways
from tables import cases, raises, refusals
from test_bus import LIMIT_S, HeldBus

HALF, FULL = torch.float16, torch.float32


def to_device(cast: str | None, **options: Any) -> Transfer:
    return Transfer("cpu", "cuda:0", FULL, HALF, cast, **options)


@cases(
    (Transfer("cpu", "cpu"), [("copy", "cpu", 800)]),
    (Transfer("cpu", "cpu", FULL, HALF), [("cast", "cpu", 600)]),
    (Transfer("cpu", "cpu", FULL, HALF, "before"), [("cast", "cpu", 600), ("copy", "cpu", 400)]),
    (Transfer("cpu", "cpu", FULL, HALF, "after"), [("copy", "cpu", 800), ("cast", "cpu", 600)]),
    (Transfer("cpu", "cuda:0", pinned=True), [("bus", "cpu → cuda:0", 400)]),
    (Transfer("cpu", "cuda:0"), [("stage", "cpu", 800), ("bus", "cpu → cuda:0", 400)]),
    (to_device("before", pinned=True), [("cast", "cpu", 600), ("bus", "cpu → cuda:0", 200)]),
    (to_device("after", pinned=True), [("bus", "cpu → cuda:0", 400), ("cast", "cuda:0", 600)]),
    (
        Transfer("paced", "cpu", FULL, HALF, "before"),
        [("cast", "paced", 600), ("stage", "cpu", 400), ("bus", "paced → cpu", 200)],
    ),
    (
        Transfer("cuda:0", "cuda:1", FULL, HALF, "after"),
        [("bus", "cuda:0 → cuda:1", 400), ("cast", "cuda:1", 600)],
    ),
    ids=str,
)
def test_the_parts_of_a_way(way: Transfer, parts: list[tuple[str, str, int]]):
    assert list(way.parts(100)) == [Part(*part) for part in parts]
    assert way.bus_bytes(100) == sum(nbytes for what, _, nbytes in parts if what == "bus")


@cases(
    ("cpu", "cuda:0", "before", "after"),
    ("cuda:0", "cpu", "after", "before"),
    ("cuda:0", "cuda:1", "before", "before"),
)
def test_a_cast_left_to_torch_is_where_its_source_says(
    source: str, target: str, blocking: str, non_blocking: str
):
    """pytorch, aten/src/ATen/native/cuda/Copy.cu: `conversion_device`."""
    for casts, asked in ((blocking, False), (non_blocking, True)):
        way = Transfer(source, target, FULL, HALF, non_blocking=asked)
        said = Transfer(source, target, FULL, HALF, casts, non_blocking=asked)
        assert list(way.parts(100)) == list(said.parts(100))


def test_the_prediction_is_the_sum_of_the_parts_and_paced_memory_is_the_cpus():
    given = Rates({("copy", "cpu"): 100.0, ("cast", "cpu"): 50.0, ("bus", "cpu → cuda:0"): 10.0})
    assert given.predict_s(Transfer("cpu", "cpu"), 100) == 8.0
    assert given.predict_s(Transfer("cpu", "cuda:0"), 100) == 8.0 + 40.0
    assert given.predict_s(to_device("before", pinned=True), 100) == 12.0 + 20.0
    given = Rates({("cast", "cpu"): 50.0, ("copy", "cpu"): 100.0, ("bus", "cpu → paced"): 10.0})
    assert given.predict_s(Transfer("cpu", PACED, FULL, HALF, "after"), 100) == 8.0 + 40.0 + 12.0


@pytest.mark.parametrize("here", [6.0, 12.0])
@pytest.mark.parametrize("there", [24.0, 60.0, 6000.0])
def test_casting_before_is_best_on_a_slow_bus_only(here: float, there: float):
    """Where 2 / bus > 6 / here - 6 / there; at the bus where both are equal, they are."""

    def seconds(bus: float, cast: str) -> float:
        casts = {("cast", "cpu"): here, ("cast", "cuda:0"): there}
        rates = Rates({("bus", "cpu → cuda:0"): bus, **casts})
        return rates.predict_s(to_device(cast, pinned=True), 100)

    even = 2 / (6 / here - 6 / there)
    assert seconds(0.99 * even, "before") < seconds(0.99 * even, "after")
    assert seconds(1.01 * even, "before") > seconds(1.01 * even, "after")
    assert seconds(even, "before") == pytest.approx(seconds(even, "after"))


def test_rates_come_from_ways_of_one_part():
    measured = [
        Measured(Transfer("cpu", "cpu"), 100, done_s=8.0, returned_s=8.0),
        Measured(Transfer("cpu", "cuda:0", pinned=True), 100, 40.0, 40.0),
        Measured(Transfer("cpu", "cuda:0", pinned=True, non_blocking=True), 100, 20.0, 1.0),
        Measured(to_device("before"), 100, 1.0, 1.0),
    ]
    found = rates_of(measured)
    assert found.bytes_per_s == {("copy", "cpu"): 100.0, ("bus", "cpu → cuda:0"): 20.0}
    paced = rates_of(measured, paced_gbps=16.0).bytes_per_s
    assert paced["bus", "cpu → paced"] == paced["bus", "paced → cpu"] == 2e9
    words = "no rate is known for the cast in cpu; measure all transfers of"
    raises(words, found.predict_s, to_device("before"), 100)


EVERY = ways(Bus())


@pytest.mark.parametrize("way", EVERY, ids=str)
def test_every_way_of_this_machine_brings_the_numbers(way: Transfer):
    rig = Rig(way, Buffers(1000), Bus())
    rig.source.mul_(3)
    rig.packed.zero_(), rig.landed.zero_(), rig.out.zero_()
    rig.timed()
    found = rig.out if way.cast == "after" else rig.landed
    assert found.dtype == way.to
    assert torch.equal(found.cpu(), rig.source.cpu().to(way.to)) and found.any()


def test_the_ways_of_a_machine():
    over_bus = [way for way in EVERY if way.ends == ("cpu", PACED)]
    assert len(over_bus) == 3 * 2 * 2
    assert not any(PACED in way.ends for way in ways())
    assert len(set(EVERY)) == len(EVERY)
    inside = [(way.to, way.cast) for way in ways() if way.ends == ("cpu", "cpu")]
    assert inside == [(FULL, None), (HALF, "before"), (HALF, "after"), (HALF, None)]


@pytest.mark.parametrize("ends", [("cpu", PACED), (PACED, "cpu")])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_only_a_pinned_non_blocking_call_returns_before(
    ends: tuple[str, str], pinned: bool, non_blocking: bool
):
    """What is pageable is staged by the program itself, whatever it asks for."""
    bus = HeldBus()
    rig = Rig(Transfer(*ends, pinned=pinned, non_blocking=non_blocking), Buffers(100), bus)
    rig.landed.zero_()
    early: list[bool] = []
    thread = threading.Thread(target=lambda: early.append(not rig.run().any()))
    thread.start()
    if pinned and non_blocking:
        thread.join(LIMIT_S)
        assert early == [True], "the call has returned, and what it returned is not there yet"
        bus.go.set()
        rig.arrival.wait()
        assert rig.landed.any()
    else:
        thread.join(0.05)
        assert thread.is_alive() and not early
        bus.go.set()
        thread.join(LIMIT_S)
        assert early == [False]


def test_ways_take_turns_and_the_median_counts(monkeypatch: pytest.MonkeyPatch):
    order: list[Transfer] = []
    first, second = Transfer("cpu", "cpu"), Transfer("cpu", "cpu", FULL, HALF)
    times = {first: iter([90.0, 1.0, 50.0, 3.0]), second: iter([90.0, 7.0, 5.0, 6.0])}

    def timed(rig: Rig) -> tuple[float, float]:
        order.append(rig.way)
        return next(times[rig.way]), 0.5

    monkeypatch.setattr(timing.Rig, "timed", timed)
    measured = measure([first, second], 10, turns=3)
    assert order == [first, second, second, first, first, second, second, first]
    # The median without the first, cold turn.
    assert measured == [Measured(first, 10, 3.0, 0.5), Measured(second, 10, 6.0, 0.5)]


def test_buffers_are_shared_by_the_ways_and_not_by_roles():
    buffers = Buffers(10)
    one, other = (Rig(Transfer("cpu", "cpu"), buffers) for _ in range(2))
    assert one.source is other.source and one.landed is other.landed
    assert one.source is not one.landed and buffers.numel == 10


test_a_way_that_cannot_be_is_refused = refusals(
    lambda make: make(),
    (lambda: Transfer("cpu", "cpu", cast="first"), 'choose "before", "after" or None'),
    (lambda: Transfer("cpu", "cpu", cast="after"), "needs no cast; choose None"),
    (lambda: Transfer("cpu", PACED, FULL, HALF), 'choose cast="before" or cast="after"'),
    (lambda: Transfer("cpu", "cpu", pinned=True), "only CPU memory can be pinned"),
    (lambda: measure([Transfer("cpu", PACED)], 10), "needs a paced bus"),
)


def test_a_way_in_words():
    way = to_device("before", pinned=True, non_blocking=True)
    assert str(way) == "cpu → cuda:0, fp32 → fp16, cast before, pinned, non-blocking"
    assert str(Transfer("cpu", "cpu")) == "cpu → cpu, fp32 → fp32"
    assert str(Transfer("cpu", PACED)) == "cpu → paced, fp32 → fp32, pageable"
    assert short(torch.bfloat16) == "bf16"


@pytest.mark.gpu
def test_a_gpus_ways_are_timed_by_its_events():
    chosen = [way for way in ways() if way.ends != ("cpu", "cpu")]
    assert {("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0", "cuda:0")} <= {w.ends for w in chosen}
    measured = measure(chosen, 1 << 16, turns=3)
    assert all(times.done_s > 0 for times in measured)
    of_cpu = {("cast", "cpu"): 1e10, ("copy", "cpu"): 1e10}
    rates = Rates({**of_cpu, **rates_of(measured).bytes_per_s})
    for way in chosen:
        if way.ends == ("cpu", "cuda:0"):
            assert rates.predict_s(way, 1 << 16) > 0


@pytest.mark.gpu
def test_a_pinned_buffer_stays_pinned_through_a_cast():
    rig = Rig(to_device("before", pinned=True, non_blocking=True), Buffers(100))
    assert rig.source.is_pinned() and rig.packed.is_pinned() and rig.landed.is_cuda
    assert not rig.source.half().is_pinned(), "the reason why packed is a buffer of its own"
