"""The weights of a block in one flat buffer: one copy over the bus, not one for each tensor.

    flat   | norm1.weight | norm1.bias | attn.q.weight              | ... |   bytes, each tensor
           ^ 0            ^ 512        ^ 1024                                  from a multiple of 64

The same bytes serve three times: as the module's own parameters in CPU memory, as what is copied,
and, where the copy has arrived, as the tensors that the block computes with.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGN_BYTES = 64  # a cache line; kernels are slower on, or refuse, tensors that lie across


class Place(NamedTuple):
    """Where a tensor lies in the flat buffer, in bytes."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


class Packed:
    """Packs the parameters and buffers of `block`, in CPU memory, pinned on demand. They become
    views of `flat`. Raises ValueError for one that is elsewhere."""

    @torch.inference_mode(False)  # the modules stay usable outside of it
    def __init__(self, block: nn.Module, pin: bool = False):
        tensors: dict[str, Tensor] = {
            **dict(block.named_parameters()),
            **dict(block.named_buffers()),
        }
        self.places: dict[str, Place] = {}
        end = 0
        for name, x in tensors.items():
            if x.device.type != "cpu":
                raise ValueError(
                    f"{name} is on {x.device}, but weights wait in CPU memory; use block.cpu()"
                )
            self.places[name] = Place(end, x.nbytes, x.dtype, x.shape)
            end += -(-x.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        self.flat = torch.zeros(end, dtype=torch.uint8, pin_memory=pin)
        for name, view in self.views(self.flat).items():
            tensors[name].data = view.copy_(tensors[name].detach())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as they lie in `flat`: this one or a copy, which may be longer."""
        return {
            name: flat[place.start : place.start + place.nbytes].view(place.dtype).view(place.shape)
            for name, place in self.places.items()
        }


def on_device(flat: Tensor, device: torch.device) -> Tensor:
    """Bytes of CPU memory as kernels of `device` see them, without a copy. On a GPU `flat` must be
    pinned: such memory has an address there, too (CUDA C++ Programming Guide, "Mapped Memory" and
    "Unified Virtual Address Space"), and each read of it goes over the bus."""
    if device.type == "cpu":
        return flat
    if not flat.is_pinned():
        raise ValueError("kernels read pinned memory only; call flat.pin_memory() before")
    there = torch.as_tensor(_Mapped(flat), device=device)
    assert there.data_ptr() == flat.data_ptr(), "torch has made a copy"
    return there


class _Mapped:
    """Names an address to torch, by the protocol that GPU libraries share tensors with (Numba,
    "CUDA Array Interface", version 2). torch keeps this object, and so the memory, alive."""

    def __init__(self, flat: Tensor):
        self.flat = flat
        self.__cuda_array_interface__ = {
            "shape": tuple(flat.shape), "typestr": "|u1", "data": (flat.data_ptr(), False),
            "version": 2,
        }  # fmt: skip
