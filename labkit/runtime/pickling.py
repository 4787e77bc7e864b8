"""Pickles functions and values for ranks, and results for the driver.

cloudpickle also handles lambdas, closures and functions defined in notebook cells. Errors name the
object that cannot be pickled, not only its type.
"""

import io
import marshal
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any

import cloudpickle
import torch


class Unpicklable(TypeError):
    """Raised for an object that cannot be pickled; the message names the object."""


@dataclass(frozen=True)
class Parcel:
    """A pickle whose tensors stay in separate buffers and are not copied."""

    data: pickle.PickleBuffer
    buffers: list[pickle.PickleBuffer]


def dumps(value: Any, name: str) -> Parcel:
    """Pickle `value`, called `name` in errors. Raises Unpicklable, which names the failing part."""
    try:
        return _dumps(value)
    except Exception as error:
        path, culprit, why = _culprit(value, name, error, depth=6, seen=set())
        raise Unpicklable(
            f"{path} cannot be pickled: it is a {type(culprit).__name__} "
            f"({_short(culprit)}): {why}. Create it inside the function that runs on the ranks, "
            "or return plain values and tensors."
        ) from None


def loads(parcel: Parcel, name: str) -> Any:
    """Unpickle a value from a rank, called `name` in errors. Raises RuntimeError on failure."""
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
    """Pickles plain tensors by value: detached, on the CPU, without the rest of their storage and,
    if possible, without a copy. Code keeps its file name, which cloudpickle 3.1.3 drops."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return marshal.loads, (marshal.dumps(value),)
        plain = type(value) is torch.Tensor and value.layout == torch.strided
        if not plain or value.is_quantized or value.is_meta:
            return super().reducer_override(value)
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        memory = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data)
        keeps_grad = value.is_leaf and value.requires_grad
        return _tensor, (memory, value.dtype, tuple(value.shape), keeps_grad)


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], grad: bool) -> torch.Tensor:
    if not memoryview(memory).nbytes:
        return torch.empty(shape, dtype=dtype, requires_grad=grad)
    if memoryview(memory).readonly:
        memory = bytearray(memory)
    return torch.frombuffer(memory, dtype=dtype).view(shape).requires_grad_(grad)


def _dumps(value: Any) -> Parcel:
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        return Parcel(pickle.PickleBuffer(file.getvalue()), buffers)


def _culprit(
    value: Any, path: str, error: Exception, depth: int, seen: set[int]
) -> tuple[str, Any, str]:
    """The innermost part that cannot be pickled: its path, the part, and the reason."""
    seen.add(id(value))
    for part_path, part in _parts(value, path) if depth else ():
        if id(part) in seen:
            continue
        try:
            _dumps(part)
        except Exception as inner:
            return _culprit(part, part_path, inner, depth - 1, seen)
    return path, value, str(error).splitlines()[0] if str(error) else type(error).__name__


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}[{key!r}]", item
    elif isinstance(value, (list, tuple, set, frozenset)):
        for i, item in enumerate(value):
            yield f"{path}[{i}]", item
    elif hasattr(value, "__code__"):
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=False):
            with suppress(ValueError):  # the variable is not assigned yet
                yield f"variable {name!r} used in {path}", cell.cell_contents
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield f"variable {name!r} used in {path}", value.__globals__[name]
        for i, default in enumerate(value.__defaults__ or ()):
            yield f"default {i} of {path}", default
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for name, attribute in vars(value).items():
            yield f"{path}.{name}", attribute


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "no repr"
    return text if len(text) <= 60 else text[:57] + "..."
