"""A paced bus carries real bytes in order and never early, on a clock that the test controls."""

import threading
import weakref
from typing import Any

import pytest
import torch

from command import python
from labkit.memory import bus as module
from labkit.memory.bus import CHUNKS, MAX_EVENTS, Bus, StreamBus, sleep_until
from labkit.runtime.clock import HOST_CLOCK
from tables import raises, refusals

LIMIT_S = 20  # of waiting for something that must come


class Clock:
    """Stands for the module `time`: only sleeping takes time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(module, "time", one)
    return one


class HeldBus(Bus):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self.go = threading.Event()

    def _carry(self, *args: Any) -> None:
        assert self.go.wait(LIMIT_S)
        super()._carry(*args)


def test_copies_and_reads_take_latency_and_bytes_over_rate_one_after_the_other(clock: Clock):
    bus = Bus(gbps=8e-6, latency_us=2e6)  # 1,000 bytes a second, 2 s before
    target = torch.zeros(250)
    copies = [bus.copy(target, torch.arange(250.0)), bus.copy(torch.zeros(500), torch.ones(500))]
    arrivals = [*copies, bus.read(3000)]
    for arrival in arrivals:
        arrival.wait()
    assert torch.equal(target, torch.arange(250.0))
    events = [arrival.event for arrival in arrivals]
    assert [event.ended_s - event.began_s for event in events] == pytest.approx([3.0, 4.0, 5.0])
    assert [event.ended_s - 100.0 for event in events] == pytest.approx([3.0, 7.0, 12.0])
    assert [(event.seq, event.op) for event in events] == [(0, "load"), (1, "load"), (2, "read")]
    assert [event.bus_bytes for event in events] == [1000, 2000, 3000]
    assert bus.moved_bytes == 6000 and bus.seconds(4000) == 6.0


def test_half_of_the_bytes_are_there_at_half_of_the_time(clock: Clock):
    target, seen, sleep = torch.zeros(16 * CHUNKS), [], clock.sleep
    clock.sleep = lambda seconds: (seen.append(int(target.sum())), sleep(seconds))
    Bus(gbps=1e-6).copy(target, torch.ones(16 * CHUNKS)).wait()
    assert seen == [16 * i for i in range(CHUNKS)]


def test_no_bus_sleeps_without_need(clock: Clock) -> None:
    Bus().copy(torch.zeros(9), torch.ones(9)).wait()
    assert clock.now_s == 100.0
    sleep_until(99.0)
    assert clock.now_s == 100.0
    sleep_until(101.5)
    assert clock.now_s == 101.5


def test_errors_of_a_copy_raise_in_the_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = HeldBus()
    bus.go.wait = lambda _: False
    arrival = bus.copy(torch.zeros(1), torch.ones(1))
    raises("", arrival.wait, error=AssertionError)
    raises("this copy failed", arrival.wait, error=RuntimeError)
    assert arrival.done()
    monkeypatch.setattr(module, "sleep_until", lambda when_s: 1 / 0)
    raises("", Bus().copy(torch.zeros(9), torch.ones(9)).wait, error=ZeroDivisionError)


@pytest.mark.slow
def test_an_unawaited_copy_does_not_keep_the_process_alive():
    program = "import torch; from labkit.memory.bus import Bus; x = torch.zeros(1000); "
    program += "Bus(gbps=8e-6, latency_us=1e9).copy(x, x.clone())"  # a thousand seconds
    python("-c", program)


def test_an_early_read_sees_the_old_value_and_a_copy_that_is_over_keeps_no_tensor_alive():
    """Asked in the engine's own thread, before it has let go of the job."""
    bus, alive = HeldBus(), []
    ends = [torch.zeros(100), torch.ones(100)]
    storages = [weakref.ref(x.untyped_storage()) for x in ends]
    arrival = bus.copy(*ends)
    arrival.future.add_done_callback(lambda _: alive.extend(x() for x in storages))
    assert not arrival.done() and ends[0].sum() == 0
    ends.clear()
    assert all(x() is not None for x in storages), "the engine holds what it is to copy"
    bus.go.set()
    bus.copy(torch.zeros(1), torch.ones(1)).wait()  # its callback is over, too
    assert alive == [None, None] and arrival.done()


def test_a_bus_lists_its_last_copies():
    bus = Bus()
    arrivals = [bus.read(1) for _ in range(MAX_EVENTS + 3)]
    arrivals[-1].wait()
    assert list(bus.events) == [one.event for one in arrivals[3:]]


def test_an_arrival_records_each_wait():
    bus = Bus()
    arrival = bus.copy(torch.zeros(9), torch.ones(9))
    assert arrival.event.wait_ended_s == 0.0
    arrival.wait()
    event = arrival.event
    assert event.issued_s <= event.began_s <= event.ended_s <= event.wait_ended_s
    assert event.wait_began_s <= event.wait_ended_s and arrival.clock is HOST_CLOCK


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_a_bus_writes_to_any_tensor_and_leaves_no_graph(block: Any):
    with block():
        target = torch.zeros(4)
    weight = torch.nn.Parameter(torch.ones(4))
    Bus().copy(target, weight).wait()
    assert target.sum() == 4 and not target.requires_grad
    Bus().copy(weight.data, torch.zeros(4)).wait()
    assert weight.sum() == 0 and weight.is_leaf


test_what_a_bus_cannot_carry_is_refused = refusals(
    Bus().copy,
    (torch.zeros(4), torch.zeros(5), r"float32 \[5\] and the target .*float32 \[4\]"),
    (torch.zeros(4).half(), torch.zeros(4), "cast before or after the copy"),
    (torch.zeros(4, 4).T, torch.zeros(4, 4), "call x.contiguous()"),
)


@pytest.mark.parametrize("options", [{"gbps": 0}, {"gbps": -1}, {"gbps": 1, "latency_us": -1}])
def test_a_bus_that_cannot_be_is_refused(options: dict[str, float]):
    raises("", Bus, **options)


def test_a_bus_that_is_gone_leaves_no_thread():
    before, bus = set(threading.enumerate()), Bus()
    bus.copy(torch.zeros(9), torch.ones(9)).wait()
    (its,) = set(threading.enumerate()) - before
    del bus
    its.join(LIMIT_S)
    assert not its.is_alive()


@pytest.mark.parametrize("waits", [True, False])
def test_on_a_gpu_memory_is_let_go_after_a_wait_only(waits: bool, monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            assert storage() is not None, "its memory may be another tensor's by now"
            log.append("waited")

    monkeypatch.setattr(torch.cuda, "Event", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    x = torch.zeros(100)
    storage = weakref.ref(x.untyped_storage())
    arrival = module._OnStream((x,), torch.device("cuda:0"), "load", 0, 400, HOST_CLOCK, "cuda")
    del x
    assert storage() is not None
    if waits:
        arrival.wait()
    else:
        del arrival
    assert storage() is None and log == ["waited"]


@pytest.mark.gpu
def test_the_bus_of_a_gpu_carries_beside_the_program():
    bus = StreamBus()
    source = torch.randn(1 << 20).pin_memory()
    target = torch.zeros(1 << 20, device="cuda")
    arrival = bus.copy(target, source)
    arrival.wait()  # the current stream waits, the program does not
    total = target.double().sum()
    assert total.item() == pytest.approx(source.double().sum().item())
    back = torch.empty(1 << 20).pin_memory()
    returned = bus.copy(back, target)
    returned.arrived.synchronize()
    assert returned.done() and torch.equal(back, source)
    bus.clock.settle(1.0)
    assert 0 < arrival.event.began_s <= arrival.event.ended_s <= returned.event.ended_s


@pytest.mark.gpu
def test_the_bus_of_a_gpu_refuses_pageable_memory():
    ends = torch.zeros(4, device="cuda"), torch.zeros(4)
    raises("the source is in pageable memory", StreamBus().copy, *ends)
