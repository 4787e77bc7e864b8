"""Activations in host memory: the same gradients, copies beside computing."""

import copy
import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from labkit import GPT, Link, offload_activations
from labkit.memory.buffers import ConstantBuffer, is_host_memory
from labkit.memory.bus import Arrival, Bus, bus_for
from labkit.memory.edits import Choices
from labkit.memory.offload import Offload
from labkit.memory.peak import PeakMemory
from labkit.memory.saved import saved_by
from recorded_memory import use_core, without_collector
from tables import raises


def gpt() -> GPT:
    torch.manual_seed(0)
    return use_core(GPT(32, 32, 3, 4, 16, dropout=0.1))


TOKENS = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))


def value_of(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return model(TOKENS).square().mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


@cache
def without() -> list[torch.Tensor]:
    model = gpt()
    value_of(model).backward()
    return gradients(model)


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize(("in_flight", "smallest_bytes"), [(1, 0), (2, 0), (3, 1000), (50, 0)])
def test_gradients_are_those_without(in_flight: int, smallest_bytes: int):
    model = gpt()
    offload = offload_activations(model, in_flight=in_flight, smallest_bytes=smallest_bytes)
    for _ in range(2):  # the second step uses the same host memory again
        with offload:
            value = value_of(model)
        value.backward()
        assert equal(gradients(model), without())
        del value
        assert offload.host.used_bytes == 0 and offload.leaving_bytes == 0
    assert offload.moved_bytes > 0


def offloaded(**options: Any) -> tuple[GPT, Offload, torch.Tensor]:
    """A model and its offload, after a forward in it."""
    model = gpt()
    offload = offload_activations(model, **{"smallest_bytes": 0, **options})
    with offload:
        return model, offload, value_of(model)


def test_a_graph_may_be_walked_twice():
    model, _, value = offloaded()
    value.backward(retain_graph=True)
    assert equal(gradients(model), without())
    value.backward()
    assert equal(gradients(model), without())


def test_it_goes_with_recomputation_and_for_parts_of_a_model():
    model = gpt()
    offload = offload_activations(model, smallest_bytes=0)
    with Choices(model, ["full", "offload", "selective"], offload=offload):
        with offload:  # the inputs of what is computed again go, too
            value = value_of(model)
        value.backward()
    assert equal(gradients(model), without())


@pytest.mark.parametrize("choice", ["offload", "selective"])
def test_a_copy_of_an_edited_model_is_a_model_of_its_own(choice: str):
    model = gpt()
    offload = offload_activations(model, smallest_bytes=0)
    edit = Choices(model, choice, offload=offload)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    value_of(twin).backward()
    assert (offload.moved_bytes > 0) == (choice == "offload")
    assert equal(gradients(twin), without()) and all(p.grad is None for p in model.parameters())
    edit.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_finds_no_room_stays():
    model, offload, value = offloaded(host_bytes=20_000)
    assert offload.no_room_bytes > 0 and 0 < offload.moved_bytes <= 20_000
    value.backward()
    assert equal(gradients(model), without())


def test_each_memory_goes_once_and_parameters_stay():
    """q, k and v save one input; a Linear saves its weight, transposed."""
    block, x = gpt().blocks[0], torch.randn(2, 16, 32, requires_grad=True)
    offload = offload_activations(block, smallest_bytes=0)
    with offload:
        y = block(x)
    assert offload.moved_bytes == sum(one.nbytes for one in saved_by(block, x))
    del y


def test_a_view_comes_back_as_it_was():
    """A part of a memory, seen with strides of its own: sin keeps its input."""
    x = torch.arange(24.0).view(4, 6).requires_grad_()
    with offload_activations(nn.Linear(1, 1), smallest_bytes=0, in_flight=1):
        whole = x * 1.0
        value = whole[1:, ::2].t().sin().sum() + (whole * whole).sum()
    value.backward()
    right = 2 * x.detach()
    right[1:, ::2] += x.detach()[1:, ::2].cos()
    assert torch.equal(x.grad, right)


def complex_gradient(context: Any) -> torch.Tensor:
    """Of functions that save x.conj() and a view with its sign turned: the memory is that of x."""
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.complex64, generator=numbers).requires_grad_()
    with context:
        kept = (x.mH @ x).real.square().sum() + (x._neg_view() * x).real.sum()
        value = kept + x.conj().imag.square().sum()  # both: turned, and of a complex memory
    return torch.autograd.grad(value, x)[0]


def test_what_is_conjugated_or_turned_comes_back_so():
    offload = offload_activations(nn.Linear(1, 1), smallest_bytes=0, in_flight=1)
    assert torch.equal(complex_gradient(offload), complex_gradient(torch.enable_grad()))
    assert offload.moved_bytes > 0


def test_memory_on_the_device_is_bounded():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    x = torch.randn(256, 64)
    one_bytes = x.nbytes
    offload = offload_activations(model, smallest_bytes=0, in_flight=2)
    with PeakMemory() as without_it:
        value = model(x).sum()
        value.backward()
    del value
    model.zero_grad()
    with PeakMemory() as memory:
        with offload:
            value = model(x).sum()
        assert memory.held_bytes <= 3 * one_bytes + 8, "two are leaving, and one may be in use"
        value.backward()
    assert without_it.peak_bytes >= 12 * one_bytes
    weights_bytes = sum(p.nbytes for p in model.parameters())  # of gradients
    assert memory.peak_bytes <= 8 * one_bytes + weights_bytes


def test_a_forward_without_a_backward_leaves_nothing():
    model = gpt()
    offload = offload_activations(model, smallest_bytes=0)
    for _ in range(3):
        with offload:
            value_of(model)
    gc.collect()
    assert offload.host.used_bytes == 0


def test_small_memory_that_stays_does_not_keep_its_graph_alive():
    """A hook that returns an output itself ties the graph to itself."""
    model = gpt()
    with PeakMemory() as memory:
        with offload_activations(model, smallest_bytes=10**9):
            value = value_of(model)
        del value
        gc.collect()
        assert memory.held_bytes < 10_000


class LoggedBus(Bus):
    """Copies only when somebody waits, and writes down what happens."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        way = "out" if is_host_memory(target) else "back"
        number = sum(word.startswith(f"ask {way}") for word in self.log)
        self.log.append(f"ask {way} {number}")
        return LoggedCopy(self, f"{way} {number}", target, source)


class LoggedCopy(Arrival):
    def __init__(self, bus: LoggedBus, name: str, target: torch.Tensor, source: torch.Tensor):
        super().__init__("load", 0, source.nbytes, bus.clock, "logged")
        self.bus, self.name, self.ends = bus, name, (target, source)

    def _wait(self) -> None:
        if self.ends:
            self.ends[0].copy_(self.ends[1])
            self.ends = ()
        self.bus.log.append(f"wait {self.name}")


def test_copies_run_ahead_in_both_directions():
    """Two tensors under way: nothing is awaited too early, and the last made comes first."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(5)]
    model, bus = nn.Sequential(*layers), LoggedBus()
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, i=i: bus.log.append(f"made {i}"))
        layer.weight.register_hook(lambda *_, i=i: bus.log.append(f"used {i}"))
    with offload_activations(model, smallest_bytes=0, in_flight=2, bus=bus):
        y = model(torch.randn(8, 8))
    y.sum().backward()
    assert bus.log == [
        "ask out 0", "made 0", "ask out 1", "made 1",
        "wait out 0", "ask out 2", "made 2", "wait out 1", "ask out 3", "made 3",
        "wait out 2", "ask out 4", "made 4",
        # 3 and 4 are still here; 2 has left: it is asked for with the first, and 1 with the next
        "ask back 0", "used 4", "ask back 1", "used 3",
        "ask back 2", "wait back 0", "used 2", "wait back 1", "used 1", "wait back 2", "used 0",
    ]  # fmt: skip


def test_a_link_paces_the_bus_and_the_bus_lists_what_went():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    offload = offload_activations(model, link=Link(800, 3), smallest_bytes=0, in_flight=2)
    with offload:
        y = model(torch.randn(8, 8))
    y.sum().backward()
    assert isinstance(offload.bus, Bus) and offload.bus.link == Link(800, 3)
    went = list(offload.bus.events)  # five went out, three came back, one after the other
    assert [event.payload_bytes for event in went] == [8 * 8 * 4] * (5 + 3)
    times = [t for event in went for t in (event.began_s, event.ended_s)]
    assert times[0] > 0 and times == sorted(times)
    assert offload.moved_bytes == 5 * 8 * 8 * 4 and offload.bus.moved_bytes == 8 * 8 * 8 * 4


def test_memory_of_no_bytes_stays():
    x = torch.zeros(0, 3, requires_grad=True)
    offload = offload_activations(nn.Linear(1, 1), smallest_bytes=0)
    with offload:
        value = (x.exp().exp().exp()).sum()
    value.backward()
    assert offload.bus.moved_bytes == 0 and not offload.bus.events


def test_a_change_in_place_is_found():
    model = nn.Linear(4, 4, bias=False)
    with offload_activations(model, smallest_bytes=0):
        x = torch.ones(2, 4)
        y = model(x)
        x.add_(1)
    raises("changed in place after it had been saved", y.sum().backward, error=RuntimeError)


@pytest.mark.parametrize("stays", [{"smallest_bytes": 10**9}, {"host_bytes": 0}])
def test_a_change_of_what_stays_is_found(stays: dict[str, int]):
    model, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with offload_activations(model, **{"smallest_bytes": 0, **stays}):
        small = x.exp()
        value = (small * 1).sum()
        of_weight = model(x).sum()
    with torch.no_grad():
        small.mul_(2)
        model.weight.mul_(2)
    for one in (value, of_weight):
        raises("changed in place after it had been saved", one.backward, error=RuntimeError)


def test_what_cannot_be_copied_leaves_no_memory_taken():
    """Without Python's collector: an error must not keep what led to it alive."""

    class Broken(Bus):
        def _carry(self, *args: object) -> None:
            raise OSError("broken")

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    offload = offload_activations(model, smallest_bytes=0, in_flight=1, bus=Broken())
    with without_collector():
        with pytest.raises(OSError, match="broken"), offload:
            model(torch.randn(8, 8))
        assert offload.host.used_bytes == 0


def test_arguments_that_cannot_be():
    words = "allow at least one tensor in flight, and no negative size"
    raises(words, offload_activations, nn.Linear(1, 1), in_flight=0)
    raises(
        "the speed of the real bus of cuda:0 cannot be set",
        bus_for,
        torch.device("cuda:0"),
        Link(gbps=1),
    )
    raises("pass offload=offload_activations", Choices, gpt(), "offload")
    raises("for each of the 3 blocks", Choices, gpt(), ["full", "none"])


def test_a_buffer_is_a_stack_of_constant_size():
    buffer = ConstantBuffer(1024)
    one, two = buffer.take(100), buffer.take(200)
    assert one is not None and two is not None and buffer.used_bytes == 128 + 256
    assert buffer.take(1000) is None, "no room"
    buffer.give_back(one)
    assert buffer.used_bytes == 384, "below the top it waits"
    raises("return each slice once", buffer.give_back, one)
    buffer.give_back(two)
    assert buffer.used_bytes == 0
    again = buffer.take(1024)
    assert again is not None and again.data_ptr() == one.data_ptr(), "the same memory"


@pytest.mark.gpu
def test_on_a_gpu_the_same_gradients_with_less_memory():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16)))
    model, x = model.cuda(), torch.randn(4096, 1024, device="cuda")
    found, peaks = [], []
    offload = offload_activations(model, host_bytes=2**30)
    for context in (torch.enable_grad(), offload, offload):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with context:
            value = model(x).square().mean()
        value.backward()
        del value
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        found.append([g.cpu() for g in gradients(model)])
    assert offload.no_room_bytes == 0
    assert equal(found[1], found[0]) and equal(found[2], found[0])
    assert peaks[2] < 0.6 * peaks[0]
