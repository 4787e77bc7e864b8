"""A failed save or load is one error on all ranks, and the checkpoint before it still loads."""

import os
import pickle
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from labkit import Comm, MasterWeights, RankError, World, ZeRO3, load_checkpoint, save_checkpoint
from labkit.checkpoints import contents, folders, saving
from tables import cases, raises


class Net(nn.Module):
    def __init__(self, wide: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, wide)
        self.second = nn.Linear(wide, 2)


def save(folder: Path, step: int, value: float | None = None) -> None:
    model = Net()
    nn.init.constant_(model.first.weight, step if value is None else value)
    save_checkpoint(folder, model, torch.optim.AdamW(model.parameters()), step=step)


def load(folder: Path) -> tuple[int | None, float]:
    model = Net()
    loaded = load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))
    assert (model.first.weight == model.first.weight[0, 0]).all()
    return loaded.step, model.first.weight[0, 0].item()


def refused(world: World, function: Callable[..., Any], *args: Any) -> str:
    """The message with which `function` fails, the same on every rank."""

    def run() -> tuple[str, str]:
        try:
            function(*args)
        except (OSError, ValueError) as error:
            return type(error).__name__, str(error)
        return "nothing", "nothing was raised"

    first, *others = world.run(run)
    assert all(other == first for other in others)
    assert first[0] != "nothing", first[1]
    return first[1]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def put(place: Any, name: str, fault: Callable[..., Any], rank: int | None = None) -> None:
    """In the rest of this process, which ends with the fault."""
    if rank in (None, Comm().rank):
        setattr(place, name, fault)


def amid_write() -> None:
    before, left = saving._serialised, iter(range(2))
    fault = lambda x: before(x) if next(left, None) is not None else die()  # noqa: E731
    put(saving, "_serialised", fault, rank=1)


def half_of_the_metadata(self: Any, metadata: Any, results: Any) -> None:
    """The file is there, half of it is not, and it does not have its name yet."""
    (Path(self.path) / ".metadata.tmp").write_bytes(pickle.dumps(metadata)[:50])
    die()


def before_checksum() -> None:
    """The metadata have their name, and not yet a checksum."""
    real = folders.seal
    put(folders, "seal", lambda path: die() if path.name == folders.METADATA else real(path))


def half_of_the_checksum(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"1234")
    die()


def half_of_the_pointer(final: Path) -> None:
    (final.parent / "latest.tmp").write_text(final.name[:4])
    die()


def half_of_the_removal(path: Path) -> None:
    next(path.glob("*.distcp")).unlink()
    die()


MOMENTS: dict[str, Callable[[], None]] = {
    "before write": lambda: put(saving.StreamingWriter, "write_items", die, rank=1),
    "amid write": amid_write,
    "before metadata": lambda: put(saving.StreamingWriter, "finish", die),
    "amid metadata": lambda: put(saving.StreamingWriter, "finish", half_of_the_metadata),
    "before checksum": before_checksum,
    "amid checksum": lambda: put(folders, "seal", half_of_the_checksum),
    "before rename": lambda: put(folders, "publish", die),
    "before pointer": lambda: put(folders, "point_at", die),
    "amid pointer": lambda: put(folders, "point_at", half_of_the_pointer),
    "amid removal": lambda: put(folders, "discard", half_of_the_removal),
}


def killed(world: World, folder: Path, moment: Callable[[], None], step: int) -> None:
    def run() -> None:
        moment()
        save(folder, step)
        Comm().barrier()

    raises("SIGKILL", world.run, run, error=RankError)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_killed_at_any_moment_leaves_the_one_before(
    world2: World, tmp_path: Path, moment: str
) -> None:
    world2.run(save, tmp_path, 1)
    world2.run(save, tmp_path, 2)
    killed(world2, tmp_path, MOMENTS[moment], 3)
    latest = 3 if moment == "amid removal" else 2
    assert world2.run(load, tmp_path) == [(latest, float(latest))] * 2
    world2.run(save, tmp_path, 4)
    assert world2.run(load, tmp_path) == [(4, 4.0)] * 2
    there = os.listdir(tmp_path)
    assert not [name for name in there if name.endswith(".tmp")], "the dead save's folder"
    assert len(there) == 3, "two checkpoints and the pointer"


def test_a_first_save_that_is_killed_leaves_no_checkpoint(world2: World, tmp_path: Path) -> None:
    killed(world2, tmp_path, amid_write, 1)
    assert "no save into it was finished" in refused(world2, load, tmp_path)
    (unfinished,) = tmp_path.iterdir()
    assert "was not finished" in refused(world2, load, unfinished)


def limited(folder: Path, step: int) -> None:
    """Rank 1 may write no file larger than 1000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if Comm().rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        save(folder, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_is_named_on_every_rank_and_nothing_is_lost(
    world2: World, tmp_path: Path
) -> None:
    world2.run(save, tmp_path, 1)
    text = refused(world2, limited, tmp_path, 2)
    assert "step 2 was not saved" in text and "rank 1" in text
    assert "File too large" in text and "__1_0.distcp" in text
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001"]
    assert world2.run(load, tmp_path) == [(1, 1.0)] * 2
    world2.run(save, tmp_path, 2)


def test_no_room_for_the_pointer_takes_the_checkpoint_back(world2: World, tmp_path: Path) -> None:
    def full(step: int) -> None:
        before = folders.point_at
        folders.point_at = lambda final: os.write(os.open("/dev/full", os.O_WRONLY), b"x")
        try:
            save(tmp_path, step)
        finally:
            folders.point_at = before

    world2.run(save, tmp_path, 1)
    assert "No space left on device" in refused(world2, full, 2)
    assert [path.name for path in sorted(tmp_path.glob("step*"))] == ["step_00000001"]
    assert world2.run(load, tmp_path) == [(1, 1.0)] * 2


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root makes a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_reported_and_the_space_freed(world2: World, tiny_disk: Path) -> None:
    def fill() -> None:
        save_checkpoint(tiny_disk, nn.Linear(300, 300), step=2)

    world2.run(save, tiny_disk, 1)
    free_bytes = shutil.disk_usage(tiny_disk).free
    text = refused(world2, fill)
    assert "No space left on device" in text and ".distcp" in text
    assert shutil.disk_usage(tiny_disk).free == free_bytes
    assert world2.run(load, tiny_disk) == [(1, 1.0)] * 2


def test_a_folder_that_cannot_be_made_is_named(world2: World, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert str(tmp_path / "taken") in refused(world2, save, tmp_path / "taken", 1)


def load_into(make: Callable[[], tuple[nn.Module, Any]], folder: Path) -> None:
    """Tries to, and sees to it that nothing is changed when it fails."""
    model, optimizer = make()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    try:
        load_checkpoint(folder, model, optimizer)
    finally:
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        assert optimizer is None or not optimizer.state


def more() -> tuple[nn.Module, Any]:
    model = Net()
    model.third = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def fewer() -> tuple[nn.Module, Any]:
    model = Net()
    del model.second
    return model, torch.optim.AdamW(model.parameters())


def wider() -> tuple[nn.Module, Any]:
    return Net(wide=7), None


def sgd() -> tuple[nn.Module, Any]:
    return (model := Net()), torch.optim.SGD(model.parameters())


def frozen() -> tuple[nn.Module, Any]:
    return (model := Net()), torch.optim.AdamW(model.first.parameters())


def other_on_rank_1() -> tuple[nn.Module, Any]:
    return more() if Comm().rank == 1 else wider()


@cases(
    (more, "another model: it lacks third.weight, third.bias;"),
    (fewer, "this model has no second.weight, second.bias"),
    (wider, "first.weight is [6, 4] there and [7, 4] here"),
    (wider, "first.bias is [6] there and [7] here"),
    (sgd, "another optimizer: it had amsgrad, betas"),
    (frozen, "this optimizer has no second.bias, second.weight"),
    (other_on_rank_1, "the ranks have different models: parameter 0 is first.weight"),
)
def test_a_checkpoint_of_another_model_is_refused_by_name(
    make: Callable[[], tuple[nn.Module, Any]], words: str, world2: World, tmp_path: Path
) -> None:
    def stepped() -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        model.second(model.first(torch.ones(1, 4))).sum().backward()
        optimizer.step()
        save_checkpoint(tmp_path, model, optimizer)

    world2.run(stepped)
    assert words in refused(world2, load_into, make, tmp_path)


def test_two_that_shard_are_one_too_many(world2: World, tmp_path: Path) -> None:
    def both() -> None:
        model = ZeRO3(Net())
        save_checkpoint(tmp_path, model, MasterWeights(model.parameters(), torch.optim.AdamW))

    assert "MasterWeights and ZeRO3 both say what a rank owns" in refused(world2, both)


def in_two_groups(model: Net) -> torch.optim.Optimizer:
    parts = (model.first, model.second)
    return torch.optim.AdamW([{"params": part.parameters()} for part in parts])


@cases(
    (lambda model: None, "optimizer=None"),  # weights alone
    (in_two_groups, "are in one parameter group here and were in several"),
)
def test_another_optimizer_is_refused(
    make: Callable[[Net], Any], words: str, world2: World, tmp_path: Path
) -> None:
    world2.run(lambda: save_checkpoint(tmp_path, model := Net(), make(model)))
    assert words in refused(world2, load, tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(world2: World, tmp_path: Path) -> None:
    assert "there is no such folder" in refused(world2, load, tmp_path / "nowhere")
    assert "it is no checkpoint" in refused(world2, load, tmp_path)
    world2.run(save, tmp_path, 1)
    (tmp_path / "latest").write_text("step_00000009\n")
    assert "are there: step_00000001" in refused(world2, load, tmp_path)
    (tmp_path / "latest").unlink()
    assert "load one of its checkpoints: step_00000001" in refused(world2, load, tmp_path)
    assert world2.run(load, tmp_path / "step_00000001") == [(1, 1.0)] * 2


def test_a_newer_format_is_refused(world2: World, tmp_path: Path) -> None:
    def newer() -> None:
        saving.FORMAT = contents.FORMAT + 1
        try:
            save(tmp_path, 1)
        finally:
            saving.FORMAT = contents.FORMAT

    world2.run(newer)
    assert "has format 2, this labkit reads up to 1" in refused(world2, load, tmp_path)


def test_arguments_that_cannot_be_are_refused(world2: World, tmp_path: Path) -> None:
    assert "keep=0" in refused(world2, lambda: save_checkpoint(tmp_path, Net(), keep=0))
    assert "step=-1" in refused(world2, lambda: save_checkpoint(tmp_path, Net(), step=-1))
    text = refused(world2, lambda: save_checkpoint(tmp_path, Net(), extra=lambda: 0))
    assert "step 0 was not saved" in text
    assert not list(tmp_path.glob("step*"))
