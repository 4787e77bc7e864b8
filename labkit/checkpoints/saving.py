"""Save a checkpoint: every slice is written by one rank, one box at a time.

    rank 0     | plan | write slices   | wait | .metadata, rename, `latest` |
    rank 1     | plan | write slices        | wait                          |

memory per rank   the model, and one box (at most 64 MiB, or one row)
communication     plans and positions of boxes, a few hundred bytes per box; no tensors

The format is torch.distributed.checkpoint's, written with its plans and metadata, so torch's
`load` reads these checkpoints. labkit's communicator replaces the communication in torch's `save`.
"""

import io
import os
import pathlib
import zlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from labkit.checkpoints import folders
from labkit.checkpoints.boxes import placed_boxes
from labkit.checkpoints.contents import (
    FORMAT,
    Contents,
    Key,
    check_single_value,
    comm_of,
    is_per_element,
    whole,
)
from labkit.checkpoints.stored import check_weights_only
from labkit.checkpoints.together import on_rank_0, together
from labkit.comm import Comm
from labkit.holdings import OwnedPiece
from labkit.runtime.progress import slow_progress

BOX_BYTES = 64 * 2**20


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    step: int = 0,
    extra: Any = None,
    keep: int = 2,
    comm: Comm | None = None,
    weights_only: bool = True,
) -> pathlib.Path:
    """Write a checkpoint into `folder`, and return the new folder. Every rank must call this.

    Args:
        folder: the folder of a run's checkpoints, visible to all ranks.
        model: a module, the strategy around it, or a Pipeline, saved as one model.
        optimizer: the model's optimizer, or the strategy around it; None saves the weights alone.
        step, extra: returned by `load_checkpoint`; rank 0's `extra` is saved.
        keep: how many checkpoints to keep, including this one.
        comm: the ranks that together hold the model, such as `mesh.comm`; if None, the strategy's
            ranks, or all ranks if there is tensor parallelism, a Pipeline or no strategy.
        weights_only: refuse an `extra` or hyperparameter that torch.load(weights_only=True) would
            refuse, such as an object of your own class. If False, also load with False.

    Until the new checkpoint is complete, the previous one stays the latest. On every rank, raises
    ValueError for invalid arguments, and OSError, naming the file, if a write fails; a failed save
    leaves nothing behind."""
    if keep < 1 or step < 0:
        raise ValueError(
            f"keep={keep}, step={step}: keep at least 1 checkpoint, and count steps from 0"
        )
    comm = comm_of(model, optimizer) if comm is None else Comm.of(comm)
    folder = pathlib.Path(folder).absolute()
    failed = f"step {step} was not saved; earlier checkpoints are unchanged"
    contents = Contents(model, optimizer, comm)
    record = {"format": FORMAT, "step": step, "extra": extra}
    planner = PiecePlanner(contents, record, comm.rank, weights_only)
    plans = together(comm, planner.create_local_plan, failed)
    plans, described = planner.create_global_plan(plans)  # the same on every rank

    unfinished = on_rank_0(comm, lambda: folders.begin(folder, step), failed)
    try:
        writer = StreamingWriter(unfinished)
        plan = writer.prepare_global_plan(plans)[comm.rank]
        results = together(comm, lambda: writer.write_items(plan, planner), failed)

        def finish() -> pathlib.Path:
            with folders.naming(unfinished / folders.METADATA):
                writer.finish(_with_further_names(described, results, contents), results)
            folders.seal(unfinished / folders.METADATA)
            return folders.publish(unfinished)

        final = on_rank_0(comm, finish, failed)
    except (OSError, ValueError):
        if comm.rank == 0:
            folders.discard(unfinished)
        raise
    failed = f"{final} is saved, but an older checkpoint could not be removed"
    on_rank_0(comm, lambda: folders.remove_old(final, keep), failed)
    return final


class PiecePlanner(DefaultSavePlanner):
    """Plans this rank's writes. Torch's global plan picks one rank to write each slice, balancing
    bytes. Rank 0 writes hyperparameters and the record; a buffer's first rank writes the buffer."""

    def __init__(self, contents: Contents, record: dict[str, Any], rank: int, weights_only: bool):
        super().__init__()
        self._contents, self._record, self._rank = contents, record, rank
        self._weights_only = weights_only
        self._items: list[WriteItem] = []
        self._data: dict[metadata.MetadataIndex, Any] = {}
        self._paths: dict[str, Key] = {}

    def create_local_plan(self) -> SavePlan:
        for piece in self._contents.to_write():
            self._piece(("model", piece.name), piece, piece.tensor)
            optimizer = piece.optimizer
            state = optimizer.state.get(piece.tensor, {}) if optimizer is not None else {}
            for key, value in state.items():  # empty before the first step
                path: Key = ("optimizer", "state", piece.name, key)
                if not isinstance(value, torch.Tensor):
                    self._value(path, value)
                elif is_per_element(key, value.shape, piece.tensor.shape):
                    self._piece(path, piece, value)
                elif piece.start == 0:
                    check_single_value(piece, key, value.shape)
                    self._piece(path, whole("", value), value)
        for name, buffer in self._contents.buffers.items():
            if self._contents.buffer_rank[name] == self._rank:
                self._piece(("model", name), whole(name, buffer), buffer)
        if self._rank == 0:
            for path, value in self._contents.hyperparameters():
                self._value(path, value)
            self._value(("labkit",), self._record)
        return SavePlan(self._items, planner_data=self._paths)

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], metadata.Metadata]:
        """Torch's global plan. Raises ValueError if the ranks' slices do not make up the model."""
        try:
            plans, described = super().create_global_plan(all_plans)
        except ValueError as error:
            raise ValueError(
                f"the shards of all ranks do not make up the model ({error}); check mark_shard"
            ) from error
        for name, shape in self._contents.shapes.items():
            entry = described.state_dict_metadata.get(f"model.{name}")
            chunks = entry.chunks if isinstance(entry, metadata.TensorStorageMetadata) else []
            if sum(chunk.sizes.numel() for chunk in chunks) != shape.numel():
                raise ValueError(f"the shards of all ranks do not make up {name}; check mark_shard")
        return plans, described

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The bytes to write for a tensor or other value."""
        data = self._data[write_item.index]
        return (_serialized(_compact_copy(data)) if torch.is_tensor(data) else data).getbuffer()

    def _value(self, path: Key, value: Any) -> None:
        key = self._key(path)
        if isinstance(value, np.generic):  # a learning rate that numpy computed
            value = value.item()
        self._data[index := metadata.MetadataIndex(key)] = data = _serialized(value)
        if self._weights_only:
            check_weights_only(data, key)
        self._items.append(WriteItem(index, WriteItemType.BYTE_IO))

    def _piece(self, path: Key, piece: OwnedPiece, tensor: torch.Tensor) -> None:
        """Plan to write `tensor`, which has as many elements as the slice, to `path`."""
        key, tensor = self._key(path), tensor.detach()
        properties = metadata.TensorProperties(dtype=tensor.dtype)
        most = BOX_BYTES // tensor.element_size()
        for box, view in placed_boxes(piece, tensor, most):
            self._data[index := metadata.MetadataIndex(key, box.offsets)] = view
            chunk = metadata.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            written = TensorWriteData(chunk, properties, piece.whole_shape)
            self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))

    def _key(self, path: Key) -> str:
        key = ".".join(map(str, path))
        self._paths[key] = path
        return key


class StreamingWriter(FileSystemWriter):
    """Writes item by item; torch's own writer keeps copies of all items until the last one."""

    def write_items(self, plan: SavePlan, planner: PiecePlanner) -> list[WriteResult]:
        """Write this rank's file and flush it to disk. An OSError names the file."""
        if not plan.items:
            return []
        name = f"{plan.storage_data.prefix}0.distcp"
        path = pathlib.Path(self.path) / name
        results = []
        with folders.naming(path), path.open("wb") as file:
            for item in slow_progress(plan.items, "saving"):
                begin_bytes = file.tell()
                data = planner.resolve_data(item)
                nbytes = file.write(data)
                where = _StorageInfo(name, begin_bytes, nbytes)
                vars(where)["crc32"] = zlib.crc32(data)  # torch's own `load` ignores it
                del data  # free it before the next item is serialized
                results.append(WriteResult(item.index, nbytes, where))
            file.flush()
            os.fsync(file.fileno())
        return results


def _serialized(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def _compact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU, without the rest of the storage."""
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def _with_further_names(
    described: metadata.Metadata, results: list[list[WriteResult]], contents: Contents
) -> metadata.Metadata:
    """Enter tied parameters under all their names; their bytes are stored once."""
    for name, first in contents.aliases.items():
        key, known = f"model.{name}", f"model.{first}"
        described.state_dict_metadata[key] = described.state_dict_metadata[known]
        described.planner_data[key] = ("model", name)
        for rank in results:
            same = [x for x in rank if x.index.fqn == known]
            indices = [metadata.MetadataIndex(key, x.index.offset) for x in same]
            rank += [WriteResult(i, 0, x.storage_data) for i, x in zip(indices, same)]
    return described
