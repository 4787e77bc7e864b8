"""A failed save or load is one error on all ranks, and the checkpoint before it still loads."""

import copy
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from command import run
from labkit import Comm, MasterWeights, RankError, World, ZeRO3, load_checkpoint, save_checkpoint
from labkit.checkpoints import contents, folders, saving
from tables import cases, raises


class Net(nn.Module):
    def __init__(self, wide: int = 6, **instead: nn.Module | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, wide), nn.Linear(wide, 2)
        for name, layer in instead.items():
            setattr(self, name, layer)


def save(folder: Path, step: int) -> None:
    model = Net()
    nn.init.constant_(model.first.weight, step)
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

    (error, message), *others = world.run(run)
    assert others == [(error, message)] * len(others)
    assert error != "nothing", message
    return message


def dies(
    place: Any,
    name: str,
    after: Callable[..., object] = lambda *_: None,
    when: Callable[..., bool] = lambda *_: True,
    rank: int | None = None,
) -> Callable[[], None]:
    """From its call on, this process kills itself in `place.name`, after it has done `after`."""

    def put() -> None:
        real = getattr(place, name)

        def fault(*args: Any) -> Any:
            if not when(*args):
                return real(*args)
            after(*args)
            return os.kill(os.getpid(), signal.SIGKILL)

        if rank in (None, Comm().rank):
            setattr(place, name, fault)

    return put


def amid_write() -> None:
    left = iter(range(2))
    dies(saving, "_serialized", when=lambda x: next(left, None) is None, rank=1)()


def half_of_the_metadata(writer: Any, metadata: Any, results: Any) -> None:
    """The file is there, half of it is not, and it does not have its name yet."""
    (Path(writer.path) / ".metadata.tmp").write_bytes(pickle.dumps(metadata)[:50])


MOMENTS: dict[str, Callable[[], None]] = {
    "before write": dies(saving.StreamingWriter, "write_items", rank=1),
    "amid write": amid_write,
    "before metadata": dies(saving.StreamingWriter, "finish"),
    "amid metadata": dies(saving.StreamingWriter, "finish", half_of_the_metadata),
    "before checksum": dies(folders, "seal", when=lambda path: path.name == folders.METADATA),
    "amid checksum": dies(
        folders, "seal", lambda path: path.write_bytes(path.read_bytes() + b"1234")
    ),
    "before rename": dies(folders, "publish"),
    "before pointer": dies(folders, "point_at"),
    "amid pointer": dies(
        folders, "point_at", lambda final: (final.parent / "latest.tmp").write_text(final.name[:4])
    ),
    "amid removal": dies(folders, "discard", lambda path: next(path.glob("*.distcp")).unlink()),
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
    assert "is an unfinished save" in refused(world2, load, unfinished)


def no_room_in_a_file(folder: Path) -> None:
    """Rank 1 may write no file larger than 1000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if Comm().rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        save(folder, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_room_for_the_pointer(folder: Path) -> None:
    full = lambda final: os.write(os.open("/dev/full", os.O_WRONLY), b"x")  # noqa: E731
    with patch.object(folders, "point_at", full):
        save(folder, 2)


def no_room_on_the_disk(folder: Path) -> None:
    save_checkpoint(folder, nn.Linear(300, 300), step=2)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root makes a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk)
    if run(*command, status=None).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    run("umount", disk)


@cases(
    (no_room_in_a_file, ["step 2 was not saved", "rank 1", "File too large", "__1_0.distcp"]),
    (no_room_for_the_pointer, ["No space left on device"]),
    (no_room_on_the_disk, ["No space left on device", ".distcp"]),
)
def test_a_save_without_room_says_so_on_every_rank_and_loses_nothing(
    save_without: Callable[[Path], None], words: list[str], world2: World,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    on_disk = save_without is no_room_on_the_disk
    folder: Path = request.getfixturevalue("tiny_disk" if on_disk else "tmp_path")
    world2.run(save, folder, 1)
    free_bytes = shutil.disk_usage(folder).free
    text = refused(world2, save_without, folder)
    assert [part for part in words if part not in text] == []
    assert sorted(os.listdir(folder)) == ["latest", "step_00000001"]
    assert not on_disk or shutil.disk_usage(folder).free == free_bytes
    assert world2.run(load, folder) == [(1, 1.0)] * 2
    world2.run(save, folder, 2)


Made = tuple[nn.Module, Any]


def made(model: nn.Module, make: Any = torch.optim.AdamW, of: nn.Module | None = None) -> Made:
    return model, make((of or model).parameters())


def after_a_step() -> Made:
    model, optimizer = made(Net())
    model.second(model.first(torch.ones(1, 4))).sum().backward()
    optimizer.step()
    return model, optimizer


def in_two_groups() -> Made:
    model = Net()
    groups = [{"params": part.parameters()} for part in (model.first, model.second)]
    return model, torch.optim.AdamW(groups)


def with_two_shards() -> Made:
    return made(ZeRO3(Net()), lambda params: MasterWeights(params, torch.optim.AdamW))


BUILT: dict[str, Callable[[], Made]] = {
    "plain": lambda: made(Net()),
    "after a step": after_a_step,
    "in two groups": in_two_groups,
    "weights alone": lambda: (Net(), None),
    "a third layer": lambda: made(Net(third=nn.Linear(2, 2))),
    "one layer": lambda: made(Net(second=None)),
    "wider": lambda: (Net(wide=7), None),
    "SGD": lambda: made(Net(), torch.optim.SGD),
    "second layer frozen": lambda: made(model := Net(), of=model.first),
    "wider on rank 0": lambda: BUILT["a third layer" if Comm().rank == 1 else "wider"](),
}


@cases(
    ("after a step", "a third layer", "another model: it lacks third.weight, third.bias;"),
    ("after a step", "one layer", "this model has no second.weight, second.bias"),
    ("after a step", "wider", "first.weight is [6, 4] in the checkpoint and [7, 4] here"),
    ("after a step", "wider", "first.bias is [6] in the checkpoint and [7] here"),
    ("after a step", "SGD", "a different optimizer: it had amsgrad, betas"),
    ("after a step", "second layer frozen", "this optimizer has no second.bias, second.weight"),
    ("after a step", "wider on rank 0", "different models: parameter 0 is first.weight"),
    ("weights alone", "plain", "optimizer=None"),
    ("in two groups", "plain", "are in one parameter group here but were saved in several"),
)
def test_another_model_or_optimizer_is_refused_by_name_and_not_changed(
    there: str, here: str, words: str, world2: World, tmp_path: Path
) -> None:
    def load_here() -> None:
        model, optimizer = BUILT[here]()
        before = copy.deepcopy(model.state_dict())
        try:
            load_checkpoint(tmp_path, model, optimizer)
        finally:
            assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
            assert optimizer is None or not optimizer.state

    world2.run(lambda: save_checkpoint(tmp_path, *BUILT[there]()))
    assert words in refused(world2, load_here)


def test_what_cannot_be_saved_is_refused(world2: World, tmp_path: Path) -> None:
    def save_built(build: Callable[[], Made], options: dict[str, Any]) -> None:
        save_checkpoint(tmp_path, *build(), **options)

    for build, options, words in (
        (with_two_shards, {}, "MasterWeights and ZeRO3 both shard the optimizer"),
        (after_a_step, {"keep": 0}, "keep=0"),
        (after_a_step, {"step": -1}, "step=-1"),
        (after_a_step, {"extra": lambda: 0}, "step 0 was not saved"),
    ):
        assert words in refused(world2, save_built, build, options)
        assert not list(tmp_path.glob("step*"))
    (tmp_path / "taken").write_text("")
    assert str(tmp_path / "taken") in refused(world2, save, tmp_path / "taken", 1)


def test_a_folder_without_a_checkpoint_is_refused(world2: World, tmp_path: Path) -> None:
    assert "the folder does not exist" in refused(world2, load, tmp_path / "nowhere")
    assert "it is not a checkpoint" in refused(world2, load, tmp_path)
    world2.run(save, tmp_path, 1)
    (tmp_path / "latest").write_text("step_00000009\n")
    assert "finished checkpoints: step_00000001" in refused(world2, load, tmp_path)
    (tmp_path / "latest").unlink()
    assert "load one of its checkpoints: step_00000001" in refused(world2, load, tmp_path)
    assert world2.run(load, tmp_path / "step_00000001") == [(1, 1.0)] * 2


def test_a_newer_format_is_refused(world2: World, tmp_path: Path) -> None:
    def newer() -> None:
        with patch.object(saving, "FORMAT", contents.FORMAT + 1):
            save(tmp_path, 1)

    world2.run(newer)
    assert "has format 2, but this labkit reads up to 1" in refused(world2, load, tmp_path)
