"""Pickles functions and values for ranks, and results for the driver.

cloudpickle also takes lambdas, closures and functions of notebook cells. An error names the object
that cannot be pickled, not only its type.
"""

import io
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch


class Unpicklable(TypeError):
    """Raised for an object that cannot be pickled; the text names it."""


@dataclass(frozen=True)
class Parcel:
    """A pickle, and separate buffers with its tensors' memory, not copied."""

    data: pickle.PickleBuffer
    buffers: list[pickle.PickleBuffer]


def dumps(thing: Any, name: str) -> Parcel:
    """Pickle `thing`, called `name` in errors. Raises Unpicklable, which names the failing part."""
    try:
        return _dumps(thing)
    except Exception as error:
        path, culprit, why = _culprit(thing, name, error, depth=6, seen=set())
        raise Unpicklable(
            f"{path} cannot be pickled: it is a {type(culprit).__name__} "
            f"({_short(culprit)}): {why}. Make it inside the function that runs on the ranks, "
            "or return plain values and tensors."
        ) from None


def loads(parcel: Parcel, name: str) -> Any:
    """Unpickle the value of a rank, called `name` in errors. Raises RuntimeError on failure."""
    try:
        return unpack(parcel)
    except Exception as error:
        raise RuntimeError(
            f"{name} arrived but cannot be unpickled here: {type(error).__name__}: {error}. "
            "Return plain values and tensors, or objects of classes that this process can import."
        ) from error


def unpack(parcel: Parcel) -> Any:
    """The value that `dumps` packed."""
    return pickle.loads(parcel.data, buffers=parcel.buffers)


class _Pickler(cloudpickle.Pickler):
    """Pickles plain tensors by value: detached, on the CPU, only the elements they view, and
    without a copy where possible."""

    def reducer_override(self, thing: Any) -> Any:
        plain = type(thing) is torch.Tensor and thing.layout == torch.strided
        if not plain or thing.is_quantized or thing.is_meta:
            return super().reducer_override(thing)
        flat = thing.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        memory = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data)
        keeps_grad = thing.is_leaf and thing.requires_grad
        return _tensor, (memory, thing.dtype, tuple(thing.shape), keeps_grad)


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], grad: bool) -> torch.Tensor:
    if not memoryview(memory).nbytes:
        return torch.empty(shape, dtype=dtype, requires_grad=grad)
    if memoryview(memory).readonly:
        memory = bytearray(memory)
    return torch.frombuffer(memory, dtype=dtype).view(shape).requires_grad_(grad)


def _dumps(thing: Any) -> Parcel:
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(thing)
        return Parcel(pickle.PickleBuffer(file.getvalue()), buffers)


def _culprit(
    thing: Any, path: str, error: Exception, depth: int, seen: set[int]
) -> tuple[str, Any, str]:
    """Descend into the first part that cannot be pickled."""
    seen.add(id(thing))
    for part_path, part in _parts(thing, path) if depth else ():
        if id(part) in seen:
            continue
        try:
            _dumps(part)
        except Exception as inner:
            return _culprit(part, part_path, inner, depth - 1, seen)
    return path, thing, str(error).splitlines()[0] if str(error) else type(error).__name__


def _parts(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield f"{path}[{key!r}]", value
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for i, value in enumerate(thing):
            yield f"{path}[{i}]", value
    elif hasattr(thing, "__code__"):
        cells = thing.__closure__ or ()
        for name, cell in zip(thing.__code__.co_freevars, cells, strict=False):
            with suppress(ValueError):  # not assigned yet
                yield f"variable {name!r} used in {path}", cell.cell_contents
        for name in thing.__code__.co_names:
            if name in thing.__globals__:
                yield f"variable {name!r} used in {path}", thing.__globals__[name]
        for i, value in enumerate(thing.__defaults__ or ()):
            yield f"default {i} of {path}", value
    elif hasattr(thing, "__dict__") and not isinstance(thing, type):
        for name, value in vars(thing).items():
            yield f"{path}.{name}", value


def _short(thing: Any) -> str:
    try:
        text = repr(thing)
    except Exception:
        text = "no repr"
    return text if len(text) <= 60 else text[:57] + "..."
