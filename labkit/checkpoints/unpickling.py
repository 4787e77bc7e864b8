"""Read pickles from untrusted files without running the code in them."""

import io
import pickle
from typing import Any

import torch

ALLOWED = {
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata ChunkStorageMetadata BytesStorageMetadata _MEM_FORMAT_ENCODING",
    # before torch 2.3
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
}


class MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of torch's `.metadata` only; raises ValueError for any other."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("pathlib", "pathlib._local"):  # the folder it was saved to; unused
            return lambda *parts: parts
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 pickles an enum member
            return lambda enum, member: enum.__members__[member]
        raise ValueError(
            f"it needs {module}.{name}, which is no part of torch's metadata and may run code; "
            "pass weights_only=False if you trust it"
        )


def check_weights_only(data: io.BytesIO, key: str) -> None:
    """Raises ValueError where torch.load(weights_only=True) refuses what torch.save wrote."""
    data.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(data):
        name = "extra" if key == "labkit" else key
        raise ValueError(
            f"{name} needs {', '.join(sorted(unsafe))}, which may run code when it is loaded; use "
            "tensors and plain Python values, or pass weights_only=False to save and to load"
        )
    data.seek(0)
