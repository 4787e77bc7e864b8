"""The folders of checkpoints, and how one replaces another in a single moment.

    FOLDER/step_00000100          a checkpoint: a file of each rank, and `.metadata`
    FOLDER/latest                 the name of the one to load
    FOLDER/step_00000300.tmp      a save that is under way, or died: it is never read

A save writes into the folder `.tmp`, has every byte on the disk, renames the folder, and then
replaces `latest`. A rename happens or does not, so whenever a save is killed, `latest` names a
checkpoint that is whole. Old ones are removed only after that. `.metadata` and `latest` end in
their own CRC-32, and `.metadata` has one for every item in the other files: it detects any flipped
bit, several times as fast as a cryptographic hash; an attacker could replace either.
"""

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path, PurePath

METADATA = ".metadata"
LATEST = "latest"
UNFINISHED = ".tmp"
NAME = re.compile(r"step_\d{8,}(\.\d+)?")


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into; what dead saves left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        if left.name.endswith(UNFINISHED) and NAME.fullmatch(left.name.removesuffix(UNFINISHED)):
            shutil.rmtree(left)
    plain = f"step_{step:08d}"
    names = chain([plain], (f"{plain}.{again}" for again in count(2)))
    # one that was saved before stays until the new one is finished
    name = next(name for name in names if not (folder / name).exists())
    unfinished = folder / (name + UNFINISHED)
    unfinished.mkdir()
    return unfinished


def publish(unfinished: Path) -> Path:
    """Make what was written to `unfinished`, whose files are on the disk, the latest checkpoint."""
    final = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    flush_folder(unfinished)
    unfinished.rename(final)
    try:
        flush_folder(final.parent)
        point_at(final)
    except OSError:  # the disk was full of the checkpoint itself: no name for half a success
        final.rename(unfinished)
        raise
    return final


def point_at(final: Path) -> None:
    """Replace the pointer `latest` in one moment."""
    new = final.parent / (LATEST + UNFINISHED)
    new.unlink(missing_ok=True)  # it may be a link, whose target is not ours to overwrite
    with naming(new):
        new.write_text(final.name + "\n")
    seal(new)
    new.replace(final.parent / LATEST)
    flush_folder(final.parent)


def seal(path: Path) -> None:
    """Append to a file a CRC-32 of it, and have both on the disk."""
    with naming(path), path.open("r+b") as file:
        file.write(b"%08x\n" % zlib.crc32(file.read()))
        file.flush()
        os.fsync(file.fileno())


def sealed(data: bytes) -> bool:
    """Whether a file's bytes end in the CRC-32 of those before, as `seal` writes it."""
    return data[-9:] == b"%08x\n" % zlib.crc32(data[:-9])


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError in this block says which file it was about; one of `write` does not by itself."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(error.filename or path)) from error


def flush_folder(folder: Path) -> None:
    """Have the names in it on the disk, too."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def discard(unfinished: Path) -> None:
    """Give the space of a failed save back."""
    shutil.rmtree(unfinished, ignore_errors=True)


def remove_old(latest: Path, keep: int) -> None:
    """Remove all but `latest` and the `keep - 1` written last before it, and those that `latest`
    was saved again in place of."""
    same = latest.name.partition(".")[0]
    others = [path for path in finished_in(latest.parent) if path != latest]
    kept = [path for path in others if path.name.partition(".")[0] != same][: keep - 1]
    for path in others:
        if path not in kept:
            dying = path.with_name(path.name + UNFINISHED)
            path.rename(dying)  # never half a checkpoint under a good name
            discard(dying)


def finished_in(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, the one written last first."""
    paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and finished(path)]
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def finished(path: Path) -> bool:
    """Whether a save came to its end there: the metadata are written last."""
    return (path / METADATA).is_file()


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder. Raises ValueError where that is outside, also by a link."""
    way, file = PurePath(name), folder / name
    outside = way.is_absolute() or ".." in way.parts
    if outside or not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{file} is outside {folder}; a checkpoint may have files in its folder only"
        )
    return file


def find(folder: Path) -> Path:
    """The checkpoint to load: `folder` itself if it is one, else the one that `latest` names.
    Raises ValueError where there is none, saying what is there."""
    if finished(folder):
        return folder
    if not folder.is_dir():
        raise ValueError(f"no checkpoint at {folder}: there is no such folder")
    if folder.name.endswith(UNFINISHED):
        raise ValueError(
            f"{folder} is a save that was not finished; load {folder.parent}, which has the last "
            "finished one"
        )
    pointer = folder / LATEST
    if not pointer.is_file():
        there = ", ".join(path.name for path in finished_in(folder))
        instead = f"; load one of its checkpoints: {there}" if there else ""
        raise ValueError(
            f"no checkpoint at {folder}: it has neither {METADATA!r} nor {LATEST!r}, so it is no "
            f"checkpoint and no save into it was finished{instead}"
        )
    data = inside(folder, LATEST).read_bytes()
    written, _, checksum = data.partition(b"\n")
    name = written.decode(errors="replace").strip()
    damaged = checksum.strip() and not sealed(data)  # a name written by hand has no checksum
    if damaged or not NAME.fullmatch(name) or not finished(folder / name):
        there = ", ".join(path.name for path in finished_in(folder)) or "none"
        what = "is damaged" if damaged else f"names {name!r}, which is no finished checkpoint"
        raise ValueError(f"{pointer} {what}; load one of those that are there: {there}")
    return folder / name
