"""Foreign or damaged checkpoints load exactly, or are refused alike on all ranks; no code runs."""

import dataclasses
import io
import os
import pickle
import random
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import metadata as before_torch_2_3
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from checkpoint_cases import first_ranks, same
from labkit import World, load_checkpoint, save_checkpoint
from labkit.checkpoints import folders, stored
from tables import cases, raises
from test_checkpoint_failures import Net, refused
from worlds import on_each_rank, world_fixture

EXTRA = {"seen": 12, "generator": torch.Generator().manual_seed(3).get_state()}
RANKS = 3


ranks = world_fixture(RANKS)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model.second(model.first(torch.ones(1, 4))).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int = 3) -> None:
    save_checkpoint(folder, *trained(), step=step, extra=EXTRA)


def outcome(folder: Path, **how: Any) -> str:
    """The message of the ValueError with which a load ends, or "exact" where all is as saved."""
    expected = trained()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    try:
        loaded = load_checkpoint(folder, model, optimizer, **how)
    except ValueError as error:
        untouched = same(before, model.state_dict()) and not optimizer.state
        return str(error) if untouched else f"loaded in part: {error}"
    exact = [
        same(expected[0].state_dict(), model.state_dict()),
        same(expected[1].state_dict(), optimizer.state_dict()),
        loaded.step in (3, None),
        loaded.step is None or same(EXTRA, loaded.extra),
    ]
    return "exact" if all(exact) else f"wrong: {exact}"


def agreed(results: list[Any]) -> Any:
    """The result of all ranks, the same on each."""
    first, *others = results
    assert all(other == first for other in others)
    return first


@pytest.fixture(scope="module")
def whole(ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(save, folder)
    shutil.copytree(folder / "step_00000003", folder / "step_00000002")
    return folder


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may spoil."""
    return shutil.copytree(whole, tmp_path / "saved") / "step_00000003"


Damage = dict[Path, bytes | None]  # what is in a file instead; None: it is gone


def flips(file: Path, count: int, seed: int) -> Iterator[Damage]:
    data = file.read_bytes()
    for bit in random.Random(seed).sample(range(8 * len(data)), count):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield {file: bytes(flipped)}


def other_damage(files: list[Path], seed: int) -> Iterator[Damage]:
    draw = random.Random(seed)
    for file in files:
        data = file.read_bytes()
        yield {file: None}
        ends = {0, 1, 9, 10, len(data) // 2, len(data) - 1, *draw.choices(range(len(data)), k=6)}
        yield from ({file: data[: -end or None]} for end in ends)
        yield from ({file: data + more} for more in (b".", b"\n", b"\0" * 9, data))
        begin = draw.randrange(len(data))
        yield {file: data[:begin] + bytes(len(data[begin : begin + 512])) + data[begin + 512 :]}
        for other in files:
            if other > file:
                yield {file: other.read_bytes(), other: data}


def after(damages: list[Damage], folder: Path, size: int) -> list[str]:
    """What each of the damages leads to, on the first `size` ranks."""
    outcomes: list[str] = []
    if (comm := first_ranks(size)) is None:
        return outcomes
    for damage in damages:
        kept = {file: file.read_bytes() for file in damage}
        comm.barrier()
        if comm.rank == 0:
            write(damage)
        comm.barrier()
        outcomes.append(outcome(folder, comm=comm))
        comm.barrier()
        if comm.rank == 0:
            write(kept)
        comm.barrier()
    return outcomes


def write(files: Damage) -> None:
    for file, data in files.items():
        if data is None:
            file.unlink()
        else:
            file.write_bytes(data)


def files_of(saved: Path) -> list[Path]:
    files = sorted([saved / ".metadata", saved.parent / "latest", *saved.glob("*.distcp")])
    assert len(files) == 2 + RANKS
    return files


@pytest.mark.slow
@pytest.mark.parametrize("size", [RANKS, 1])
def test_every_flipped_bit_is_refused_by_the_name_of_its_file(
    ranks: World, saved: Path, size: int
) -> None:
    damages = [x for k, file in enumerate(files_of(saved)) for x in flips(file, 60, seed=k + size)]
    texts = agreed(ranks.run(after, damages, saved.parent, size)[:size])
    says = {
        ".metadata": r" cannot be read by torch .* \(it does not match its checksum\)",
        "latest": "",
    }
    of_items = r" is damaged: bytes \d+ to \d+ are missing or have changed"
    of_items += "; load another checkpoint from the same folder"
    for damage, text in zip(damages, texts, strict=True):
        (file,) = damage
        assert text.startswith("nothing was loaded"), text
        assert re.search(re.escape(str(file)) + says.get(file.name, of_items), text), text


@pytest.mark.slow
@pytest.mark.parametrize("size", [RANKS, 1])
def test_other_damage_is_refused_or_harmless(ranks: World, saved: Path, size: int) -> None:
    damages = list(other_damage(files_of(saved), seed=size))
    texts = agreed(ranks.run(after, damages, saved.parent, size)[:size])
    for damage, text in zip(damages, texts, strict=True):
        named = None in damage.values() or any(str(file) in text for file in damage)
        assert text == "exact" or (text.startswith("nothing was loaded") and named), text
    harmless = {next(iter(damage)) for damage, text in zip(damages, texts) if text == "exact"}
    assert {*saved.glob("*.distcp")} <= harmless, "bytes behind the last that was saved"
    assert texts.count("exact") < len(texts) / 2


def test_the_ranks_share_the_work_of_checking(ranks: World, saved: Path) -> None:
    def load() -> int:
        with patch.object(stored, "zlib") as zlib_here:
            zlib_here.crc32.side_effect = zlib.crc32
            assert outcome(saved) == "exact"
        return sum(len(call.args[0]) for call in zlib_here.crc32.call_args_list)

    nbytes = sum(file.stat().st_size for file in saved.glob("*.distcp"))
    shares = ranks.run(load)
    assert sum(shares) == nbytes and max(shares) < 0.6 * nbytes


class Marks:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def reseal(saved: Path, metadata: Any, protocol: int = 4) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    folders.seal(saved / ".metadata")


def metadata_of(saved: Path) -> Metadata:
    return dcp.FileSystemReader(saved).read_metadata()


def replace(saved: Path, key: str, value: Any, path: tuple[Any, ...] = ()) -> None:
    """Have another value at `key`, with its right checksum."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data, file = buffer.getvalue(), saved / "__0_0.distcp"
    where = _StorageInfo(file.name, file.stat().st_size, len(data))
    where.crc32 = zlib.crc32(data)  # type: ignore[attr-defined]
    with file.open("ab") as stream:
        stream.write(data)
    metadata = metadata_of(saved)
    indices = [index for index in metadata.storage_data if index.fqn == key]
    if not indices:
        indices = [MetadataIndex(key)]
        metadata.planner_data[key] = path
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.storage_data |= dict.fromkeys(indices, where)
    reseal(saved, metadata)


IN_STATE = ("optimizer", "state", "first.weight", "more")
PLACES: dict[str, Callable[[Path, Marks], object]] = {
    "metadata": lambda saved, x: reseal(
        saved, dataclasses.replace(metadata_of(saved), storage_meta=x)
    ),
    "metadata of old": lambda saved, x: (saved / ".metadata").write_bytes(
        pickle.dumps([metadata_of(saved), x])
    ),
    "state": lambda saved, x: replace(saved, ".".join(IN_STATE), x, IN_STATE),
    "extra": lambda saved, x: replace(saved, "labkit", {"format": 1, "step": 3, "extra": x}),
    "hyperparameters": lambda saved, x: replace(saved, "optimizer.param_groups.0.lr", x),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_in_a_checkpoint_does_not_run(ranks: World, saved: Path, place: str) -> None:
    PLACES[place](saved, Marks(saved / "marker"))
    text = agreed(ranks.run(outcome, saved))
    assert text.startswith("nothing was loaded") and "posix.mkdir" in text, text
    assert "weights_only=False" in text and "\n" not in text
    assert not (saved / "marker").exists()
    with suppress(ValueError):  # for the optimizer's new state
        load_checkpoint(saved, *trained(), weights_only=False)
    assert (saved / "marker").exists(), "what may run code does"


def test_code_in_a_tensor_does_not_run(ranks: World, saved: Path) -> None:
    replace(saved, "model.first.weight", Marks(saved / "marker"))
    for weights_only in (True, False):
        text = agreed(ranks.run(outcome, saved, weights_only=weights_only))
        assert "model.first.weight cannot be read" in text, text
    assert not (saved / "marker").exists()


@pytest.mark.parametrize(
    "names",
    [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch.hub", "load"),
     ("torch.distributed.checkpoint.metadata", "os.system"),
     ("torch.distributed.checkpoint.metadata", "Any")],
)  # fmt: skip
def test_metadata_names_nothing_but_its_own_classes(names: tuple[str, str]) -> None:
    module, name = (b"\x8c" + bytes([len(x)]) + x.encode() for x in names)
    call = b"\x80\x04" + module + name + b"\x93\x8c\x04true\x85R."
    with pytest.raises(ValueError, match=f"{names[1]}, which is not part of torch's metadata"):
        stored.MetadataUnpickler(io.BytesIO(call)).load()


def test_getattr_in_metadata_gives_members_of_enums_only() -> None:
    metadata = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
    pickled = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93" + metadata + b"\x8c\x08__init__\x86R."
    raises("__members__", stored.MetadataUnpickler(io.BytesIO(pickled)).load, error=AttributeError)


@pytest.mark.parametrize("name", ["/absolute", "../../upwards", "linked", "folder/in_a_link"])
def test_a_file_outside_the_folder_is_not_read(
    ranks: World, saved: Path, tmp_path: Path, name: str
) -> None:
    away = (saved / "__1_0.distcp").rename(tmp_path / Path(name).name)
    name = str(away) if name == "/absolute" else name
    (saved / "linked").symlink_to(away)
    (saved / "folder").symlink_to(away.parent)
    assert away.samefile(saved / name)
    metadata = metadata_of(saved)
    for where in metadata.storage_data.values():
        if where.relative_path == "__1_0.distcp":
            where.relative_path = name
    reseal(saved, metadata)
    assert f"{saved / name} is outside {saved}" in agreed(ranks.run(outcome, saved))


def test_metadata_and_pointer_are_not_read_through_links(
    ranks: World, saved: Path, tmp_path: Path
) -> None:
    for file in (saved / ".metadata", saved.parent / "latest"):
        away = file.rename(tmp_path / "away")
        file.symlink_to(away)
        assert f"{file} is outside {file.parent}" in agreed(ranks.run(outcome, saved.parent))
        file.unlink()
        away.rename(file)
    (saved.parent.parent / "here").symlink_to(saved)
    assert ranks.run(outcome, saved.parent.parent / "here") == ["exact"] * RANKS


def test_a_pipe_in_place_of_a_file_does_not_hang(ranks: World, saved: Path) -> None:
    (saved / "__1_0.distcp").unlink()
    os.mkfifo(saved / "__1_0.distcp")
    assert all("__1_0.distcp is damaged" in text for text in ranks.run(outcome, saved))


def test_a_save_does_not_write_through_a_link(ranks: World, saved: Path) -> None:
    (precious := saved.parent / "precious").write_text("precious")
    (saved.parent / "latest.tmp").symlink_to(precious)
    ranks.run(save, saved.parent, 4)
    assert precious.read_text() == "precious"
    assert (saved.parent / "latest").read_text().startswith("step_00000004\n")


class Own: ...


@cases(
    ({"deep": [Own()]}, "Own"),
    (np.random.RandomState(0).get_state(), "numpy.ndarray"),
    (np.float64(1), "numpy"),
    (Path("x"), "pathlib.PosixPath"),
    (nn.Identity(), "torch.nn.modules.linear.Identity"),
)
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(
    value: Any, name: str, ranks: World, saved: Path
) -> None:
    def save_it(**how: Any) -> None:
        save_checkpoint(saved.parent, *trained(), step=9, extra=value, **how)

    before = sorted(os.listdir(saved.parent))
    text = refused(ranks, save_it)
    assert text.startswith("step 9 was not saved") and "extra needs " in text and name in text
    assert text.endswith("or pass weights_only=False to save and to load") and "\n" not in text
    assert sorted(os.listdir(saved.parent)) == before
    ranks.run(save_it, weights_only=False)
    assert all("extra needs" in text and name in text for text in ranks.run(outcome, saved.parent))
    loaded = ranks.run(lambda: load_checkpoint(saved.parent, *trained(), weights_only=False).extra)
    assert all(type(extra) is type(value) for extra in loaded)


@on_each_rank("ranks")
def test_plain_values_random_states_and_a_learning_rate_of_numpy_come_back(tmp_path: Path) -> None:
    extra = {
        "python": random.Random(5).getstate(),
        "numpy": np.random.default_rng(5).bit_generator.state,
        "torch": torch.Generator().manual_seed(5).get_state(),
        "set": {1, 2}, "complex": 1j, "bytes": b"ab", "dtype": torch.bfloat16, None: (1.5, [True]),
    }  # fmt: skip
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = np.cos(np.float64(1)) / 3
    save_checkpoint(tmp_path, model, optimizer, extra=extra)
    model, optimizer = trained()
    assert same(extra, load_checkpoint(tmp_path, model, optimizer).extra)
    lr = optimizer.param_groups[0]["lr"]
    assert type(lr) is float and lr == float(np.cos(1) / 3)


def warned(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert outcome(folder) == "exact"
    return [str(warning.message) for warning in caught]


def test_an_old_checkpoint_loads_with_one_warning(ranks: World, saved: Path) -> None:
    assert ranks.run(warned, saved.parent) == [[]] * RANKS
    metadata = metadata_of(saved)  # as labkit wrote it before it had checksums
    for where in metadata.storage_data.values():
        vars(where).pop("crc32", None)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    (saved.parent / "latest").write_text("step_00000003\n")
    first, *others = ranks.run(warned, saved.parent)
    assert len(first) == 1 and f"{saved} has no checksums" in first[0]
    assert others == [[]] * (RANKS - 1)
    file = next(saved.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)
    assert f"{file} is damaged" in agreed(ranks.run(outcome, saved))


def in_python_3_11_2(saved: Path) -> None:
    """Its enums were pickled as `getattr(enum, name)`."""
    by_name = patch.object(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda x, _: (getattr, (type(x), x.name))
    )
    with by_name:
        reseal(saved, metadata_of(saved))
    assert b"getattr" in (saved / ".metadata").read_bytes()


def before_2_3(saved: Path) -> None:
    """Torch had other classes then."""
    metadata = metadata_of(saved)
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            old = before_torch_2_3.TensorProperties(entry.properties.dtype)
            entry.properties = old  # type: ignore[assignment]
    reseal(saved, metadata)


@pytest.mark.parametrize("age", [in_python_3_11_2, before_2_3])
def test_metadata_of_older_versions_load(
    ranks: World, saved: Path, age: Callable[[Path], None]
) -> None:
    age(saved)
    assert ranks.run(outcome, saved) == ["exact"] * RANKS
