"""A checkpoint on disk: its entries, read in parts, by default without running code."""

import pathlib
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from io import BytesIO
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)  # fmt: skip
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from labkit.checkpoints.boxes import placed_boxes
from labkit.checkpoints.contents import Key, whole
from labkit.checkpoints.folders import METADATA, inside, sealed
from labkit.holdings import OwnedPiece
from labkit.runtime.progress import slow_progress

# The classes and functions that torch's metadata may contain: module -> names.
ALLOWED = {
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata ChunkStorageMetadata BytesStorageMetadata _MEM_FORMAT_ENCODING",
    # used before torch 2.3
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
}


Fill = tuple[Key, OwnedPiece]
"""A path in the checkpoint, and the slice whose tensor is to be filled from this path."""


class Stored:
    """The checkpoint in a folder.

    entries        path of names -> entry in torch's metadata
    has_checksums  False if torch's own `save` or an older labkit wrote the files

    Raises ValueError if the folder's metadata is damaged, cannot be read or, with `weights_only`,
    could run code."""

    def __init__(self, folder: pathlib.Path, weights_only: bool):
        self.folder, self.weights_only = folder, weights_only
        self._reader = FileSystemReader(folder)
        data = inside(folder, METADATA).read_bytes()
        try:
            if not data.endswith(pickle.STOP) and not sealed(data):
                raise ValueError("it does not match its checksum")
            unpickler = MetadataUnpickler if weights_only else pickle.Unpickler
            metadata = unpickler(BytesIO(data)).load()
            self._reader.set_up_storage_reader(metadata, is_coordinator=False)
            keys: dict[str, Key] = metadata.planner_data
            self._keys = {tuple(path): key for key, path in keys.items()}
            self.entries = {
                path: metadata.state_dict_metadata[key] for path, key in self._keys.items()
            }
            stored = self._reader.storage_data.values()
            self.has_checksums = all(hasattr(where, "crc32") for where in stored)
        except Exception as error:
            raise ValueError(
                f"{folder / METADATA} cannot be read by torch {torch.__version__} ({error}); it "
                "is damaged, or was written by a newer version"
            ) from error

    def check(self, rank: int, ranks: int) -> None:
        """Verify size and checksum of this rank's share of items. Raises ValueError for damage."""
        places = {(x.relative_path, x.offset): x for x in self._reader.storage_data.values()}
        for name, offset in slow_progress(sorted(places)[rank::ranks], "checking"):
            where, file = places[name, offset], inside(self.folder, name)
            end = offset + where.length
            good = file.is_file() and file.stat().st_size >= end
            if good and hasattr(where, "crc32"):
                with file.open("rb") as stream:
                    stream.seek(offset)
                    good = zlib.crc32(stream.read(where.length)) == where.crc32
            if not good:
                raise ValueError(
                    f"{file} is damaged: bytes {offset} to {end} are missing or have "
                    "changed; load another checkpoint from the same folder"
                )

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Rename tied parameters' optimizer state: pipelines may save it under another name."""
        for path in [path for path in self.entries if path[:2] == ("optimizer", "state")]:
            here = (*path[:2], aliases.get(str(path[2]), path[2]), *path[3:])
            if here not in self.entries:
                self.entries[here], self._keys[here] = self.entries.pop(path), self._keys.pop(path)

    def under(self, *prefix: str | int) -> dict[Any, Any]:
        """Entries one level below `prefix`, by name, as in `under("model")`."""
        n = len(prefix)
        return {
            path[n]: entry
            for path, entry in self.entries.items()
            if path[:n] == prefix and len(path) == n + 1
        }

    def value(self, path: Key) -> Any:
        """The whole value at a path."""
        entry = self.entries[path]
        if isinstance(entry, TensorStorageMetadata):
            value = torch.empty(entry.size, dtype=entry.properties.dtype)
            self.read([(path, whole("", value))])
            return value
        index = MetadataIndex(self._keys[path])
        empty = torch.Size([])
        item = ReadItem(LoadItemType.BYTE_IO, index, empty, index, empty, empty)
        return self._read(item, BoxPlanner({}, self.weights_only))

    def read(self, fills: Iterable[Fill], label: str = "loading") -> None:
        """Fill tensors, box by box in the order of the files; the tensors keep their dtypes."""
        items: list[ReadItem] = []
        planner = BoxPlanner({}, self.weights_only)
        for number, fill in enumerate(fills):
            items += self._items(number, fill, planner)
        items.sort(key=lambda item: self._place(item.storage_index))
        for item in slow_progress(items, label):
            self._read(item, planner)

    def _items(self, number: int, fill: Fill, planner: "BoxPlanner") -> list[ReadItem]:
        """The read items of a tensor's boxes; adds the views to fill to `planner`."""
        path, piece = fill
        key, entry, items = self._keys[path], self.entries[path], []
        assert isinstance(entry, TensorStorageMetadata)
        for box, view in placed_boxes(piece, piece.tensor.detach(), piece.shape.numel()):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            parts = create_read_items_for_chunk_list(key, entry, [chunk])
            if sum(prod(part.lengths) for part in parts) != box.numel:
                raise ValueError(f"{self.folder} has lost a part of {key}; load another checkpoint")
            planner.views[index := MetadataIndex(f"{number} {key}", box.offsets)] = view
            items += [replace(part, dest_index=index) for part in parts]
        return items

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        where = self._reader.storage_data[index]
        return where.relative_path, where.offset

    def _read(self, item: ReadItem, planner: "BoxPlanner") -> Any:
        try:
            self._reader.read_data(LoadPlan([item]), planner).wait()
        except Exception as error:
            name, file = item.storage_index.fqn, self.folder / self._place(item.storage_index)[0]
            why = str(error).partition("\n")[0]
            raise ValueError(f"{name} cannot be read from {file}: {why}") from error
        return planner.value


class BoxPlanner(DefaultLoadPlanner):
    """Provides torch's reader with the destination of each box."""

    def __init__(self, views: dict[MetadataIndex, torch.Tensor], weights_only: bool):
        super().__init__()
        self.views, self.weights_only = views, weights_only
        self.value: Any = None

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self.views[read_item.dest_index]
        for dim, (at, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            view = view.narrow(dim, at, size)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The reader has already filled the view."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        if self.weights_only:
            check_weights_only(value, read_item.storage_index.fqn)
        self.value = torch.load(value, weights_only=self.weights_only)


class MetadataUnpickler(pickle.Unpickler):
    """Builds only the classes of torch's `.metadata`; raises ValueError for any other class."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("pathlib", "pathlib._local"):  # the folder of the save; unused
            return lambda *parts: parts
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 pickles an enum member
            return lambda enum, member: enum.__members__[member]
        raise ValueError(
            f"it needs {module}.{name}, which is not part of torch's metadata and may run code; "
            "pass weights_only=False if you trust the checkpoint"
        )


def check_weights_only(data: BytesIO, key: str) -> None:
    """Raises ValueError if torch.load(weights_only=True) would refuse torch.save's `data`."""
    data.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(data):
        name = "extra" if key == "labkit" else key
        raise ValueError(
            f"{name} needs {', '.join(sorted(unsafe))}, which may run code when it is loaded; use "
            "tensors and plain Python values, or pass weights_only=False to save and to load"
        )
    data.seek(0)
