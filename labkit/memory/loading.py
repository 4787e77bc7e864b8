"""Three ways to run a model on a device while its weights are in CPU memory.

    load, then run    bus      | L0 | L1 | L2 |                       sum of L + sum of C
                      compute                 | C0 | C1 | C2 |        holds the whole model

    pipelined         bus      | L0 | L1 | L2 |                       L + (n - 1) max(L, C) + C
                      compute       | C0 | C1 | C2 |                  holds ahead + 1 blocks

    in place          bus      | R0 | R1 | R2 |                       n max(R, C)
                      compute  | C0 | C1 | C2 |                       holds no blocks

L: time to load a block; C: time to compute it; R: time to read its weights during compute. In a
pipelined run, blocks share `ahead` + 1 buffers: block k + `ahead` overwrites block k - 1.

All three are forward only. Sources: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section
6.2; inference from CPU memory: Sheng et al., FlexGen, arXiv 2303.06865, section 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from labkit.memory.buffers import ALIGNED_BYTES
from labkit.memory.bus import Arrival, Bus, StreamBus
from labkit.trace import RankTrace, Span, Step, Trace


class Waiting:
    """Blocks, each block(x) -> x, with weights in CPU memory that are read over `bus`: by default
    the GPU's bus or, without a GPU, an unpaced `Bus`. Each block's weights are packed into a flat
    buffer, pinned for a GPU. Raises ValueError if blocks are not on the CPU or share a weight."""

    def __init__(self, blocks: Sequence[nn.Module], bus: Bus | StreamBus | None = None):
        if bus is None:
            bus = StreamBus() if torch.cuda.is_available() else Bus()
        self.bus, self.blocks = bus, list(blocks)
        seen: dict[int, int] = {}
        for k, block in enumerate(self.blocks):
            for x in block.parameters():
                if seen.setdefault(id(x), k) != k:
                    raise ValueError(
                        f"blocks {seen[id(x)]} and {k} share a weight, but blocks are "
                        "packed separately; merge the two blocks, or untie the weight"
                    )
        self.packed = [Packed(block, pin=bus.device.type == "cuda") for block in self.blocks]

    @property
    def nbytes(self) -> list[int]:
        return [packed.flat.nbytes for packed in self.packed]

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass
class Run:
    """Result, memory and events of a run. `held_bytes`: size of weight buffers on the device."""

    value: Tensor
    held_bytes: int
    moved_bytes: int
    arrivals: list[Arrival] = field(repr=False)
    computed: list[Span] = field(repr=False)
    about: dict[str, object] = field(repr=False)

    @property
    def trace(self) -> Trace:
        """A trace for plot.timeline: compute and its waits, with the bus below them."""
        events = [arrival.event for arrival in self.arrivals]
        ended_s = max(span.ended_s for span in self.computed)
        began_s = min([self.computed[0].began_s, *(event.issued_s for event in events)])
        steps = [Step(0, began_s, ended_s)]
        rank = RankTrace(0, 1, steps=steps, spans=list(self.computed), comms=events)
        return Trace({0: rank}, self.about).from_zero()


@torch.no_grad()
def load_then_run(waiting: Waiting, x: Tensor) -> Run:
    """Load all weights, then compute block after block."""
    runner = _Runner(waiting, len(waiting))
    for k in range(len(waiting)):
        runner.load(k)
    for k in range(len(waiting)):
        runner.arrivals[k].wait()
    for k in range(len(waiting)):
        x = runner.compute(k, x)
    return runner.result(x)


@torch.no_grad()
def run_pipelined(waiting: Waiting, x: Tensor, ahead: int = 1) -> Run:
    """Load the weights of block k + `ahead` while block k computes; with `ahead` 0, nothing
    overlaps. Raises ValueError if `ahead` is negative."""
    if ahead < 0:
        raise ValueError(f"ahead={ahead}: choose 0 or more blocks to load ahead")
    runner = _Runner(waiting, min(ahead + 1, len(waiting)))
    for k in range(ahead):
        runner.load(k)
    for k in range(len(waiting)):
        runner.load(k + ahead)  # overwrites block k - 1, which has been computed
        runner.arrivals[k].wait()
        x = runner.compute(k, x)
    return runner.result(x)


@torch.no_grad()
def run_in_place(waiting: Waiting, x: Tensor) -> Run:
    """Compute with weights in CPU memory. On a GPU, kernels read pinned memory over the bus, and
    `moved_bytes` stays 0. On a paced bus, each block waits until its bytes have been read once."""
    runner = _Runner(waiting, buffers=0)
    for k in range(len(waiting)):
        x = runner.compute(k, x)
    return runner.result(x)


class _Runner:
    def __init__(self, waiting: Waiting, buffers: int):
        if not len(waiting):
            raise ValueError("there is no block to run; pass at least one to Waiting")
        self.waiting, self.bus = waiting, waiting.bus
        self.moved_bytes = self.bus.moved_bytes
        self.arrivals: list[Arrival] = []
        self.computed: list[Span] = []
        # Whole model: one buffer per block. Pipelined: buffers as large as the largest block.
        sizes = waiting.nbytes if buffers == len(waiting) else [max(waiting.nbytes)] * buffers
        with torch.inference_mode(False):  # the bus's thread writes to the buffers
            self.buffers = [
                torch.empty(size, dtype=torch.uint8, device=self.bus.device) for size in sizes
            ]

    def load(self, k: int) -> None:
        if k < len(self.waiting):
            source = self.waiting.packed[k].flat
            self.arrivals.append(self.bus.copy(self._buffer(k)[: source.nbytes], source))

    def compute(self, k: int, x: Tensor) -> Tensor:
        packed, read = self.waiting.packed[k], None
        span = Span("forward", f"block {k}", 0, 0.0, 0.0, 0, type(self.waiting.blocks[k]).__name__)
        self.computed.append(span)
        self.bus.clock.begin(span)
        if self.buffers:
            weights = packed.views(self._buffer(k))
        else:
            weights = packed.views(on_device(packed.flat, self.bus.device))
            read = self.bus.read(packed.flat.nbytes) if isinstance(self.bus, Bus) else None
        x = functional_call(self.waiting.blocks[k], weights, (x,))
        if read:
            self.arrivals.append(read)
            read.wait()
        self.bus.clock.end(span)
        return x

    def _buffer(self, k: int) -> Tensor:
        return self.buffers[k % len(self.buffers)]

    def result(self, x: Tensor) -> Run:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        self.bus.clock.settle()
        held_bytes = sum(buffer.nbytes for buffer in self.buffers)
        moved_bytes = self.bus.moved_bytes - self.moved_bytes
        about: dict[str, object] = {}
        if isinstance(self.bus, Bus) and self.bus.link.seconds(1) > 0:  # paced
            about["link"] = {"gbps": self.bus.link.gbps}
        return Run(x, held_bytes, moved_bytes, self.arrivals, self.computed, about)


class Packed:
    """Packs parameters and buffers of `block` into one CPU tensor, `flat`, so one copy moves them
    all; they become views of `flat`. `pin`: page-lock `flat`. Raises ValueError for other devices.

        flat   | norm1.weight | norm1.bias | attn.q.weight    | ...     each at a multiple of 64 B
    """

    @torch.inference_mode(False)  # the modules stay usable outside inference mode
    def __init__(self, block: nn.Module, pin: bool = False):
        tensors: dict[str, Tensor] = dict(block.named_parameters())
        tensors.update(block.named_buffers())
        self.places: dict[str, tuple[slice, torch.dtype, torch.Size]] = {}  # bytes in `flat`
        end = 0
        for name, x in tensors.items():
            if x.device.type != "cpu":
                raise ValueError(
                    f"{name} is on {x.device}, but must be in CPU memory; use block.cpu()"
                )
            self.places[name] = slice(end, end + x.nbytes), x.dtype, x.shape
            end += -(-x.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self.flat = torch.zeros(end, dtype=torch.uint8, pin_memory=pin)
        for name, view in self.views(self.flat).items():
            tensors[name].data = view.copy_(tensors[name].detach())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as views of `flat`: `self.flat`, or a buffer that holds a copy."""
        places = self.places.items()
        return {name: flat[at].view(dtype).view(shape) for name, (at, dtype, shape) in places}


def on_device(flat: Tensor, device: torch.device) -> Tensor:
    """View CPU memory as kernels of `device` see it, without a copy. On a GPU, `flat` must be
    pinned, which maps it to a device address (CUDA C++ Programming Guide, "Mapped Memory")."""
    if device.type == "cpu":
        return flat
    if not flat.is_pinned():
        raise ValueError("GPUs can only read pinned CPU memory; pass flat.pin_memory()")
    mapped = torch.as_tensor(_Mapped(flat), device=device)
    assert mapped.data_ptr() == flat.data_ptr(), "torch has made a copy"
    return mapped


class _Mapped:
    """Passes an address to torch via the "CUDA Array Interface", version 2; keeps memory alive."""

    def __init__(self, flat: Tensor):
        self.flat = flat
        self.__cuda_array_interface__ = {
            "shape": tuple(flat.shape), "typestr": "|u1", "data": (flat.data_ptr(), False),
            "version": 2,
        }  # fmt: skip
