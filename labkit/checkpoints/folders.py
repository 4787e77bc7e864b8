"""Checkpoint folders, and how one checkpoint replaces another atomically.

    FOLDER/step_00000100          a checkpoint: one file per rank, and `.metadata`
    FOLDER/latest                 the name of the checkpoint to load
    FOLDER/step_00000300.tmp      a save that is in progress or was killed; never read

A save writes into the `.tmp` folder, flushes every byte to disk, renames the folder, replaces
`latest`, and only then removes old checkpoints. A rename is atomic, so whenever a save is killed,
`latest` names a complete checkpoint. `.metadata` and `latest` each end in a CRC-32, and `.metadata`
contains a CRC-32 per item of the other files. A CRC detects any flipped bit and is several times as
fast as a cryptographic hash; an attacker could recompute either.
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
    """Create an empty folder for the checkpoint of `step`, and remove leftovers of killed saves."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        if left.name.endswith(UNFINISHED) and NAME.fullmatch(left.name.removesuffix(UNFINISHED)):
            shutil.rmtree(left)
    plain = f"step_{step:08d}"
    names = chain([plain], (f"{plain}.{again}" for again in count(2)))
    # An earlier save of this step is kept until the new one is finished.
    name = next(name for name in names if not (folder / name).exists())
    unfinished = folder / (name + UNFINISHED)
    unfinished.mkdir()
    return unfinished


def publish(unfinished: Path) -> Path:
    """Make `unfinished`, with all its files on disk, the latest checkpoint."""
    final = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    flush_folder(unfinished)
    unfinished.rename(final)
    try:
        flush_folder(final.parent)
        point_at(final)
    except OSError:  # such as a full disk: the checkpoint must not keep its final name
        final.rename(unfinished)
        raise
    return final


def point_at(final: Path) -> None:
    """Replace the pointer `latest` atomically."""
    new = final.parent / (LATEST + UNFINISHED)
    new.unlink(missing_ok=True)  # `new` may be a link: never overwrite its target
    with naming(new):
        new.write_text(final.name + "\n")
    seal(new)
    new.replace(final.parent / LATEST)
    flush_folder(final.parent)


def seal(path: Path) -> None:
    """Append the file's CRC-32, and flush the file to disk."""
    with naming(path), path.open("r+b") as file:
        file.write(b"%08x\n" % zlib.crc32(file.read()))
        file.flush()
        os.fsync(file.fileno())


def sealed(data: bytes) -> bool:
    """Whether `data` ends in the CRC-32 of its preceding bytes, as `seal` writes."""
    return data[-9:] == b"%08x\n" % zlib.crc32(data[:-9])


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to an OSError raised in this block, because `write` does not add it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(error.filename or path)) from error


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def discard(unfinished: Path) -> None:
    """Delete a failed save."""
    shutil.rmtree(unfinished, ignore_errors=True)


def remove_old(latest: Path, keep: int) -> None:
    """Keep only `latest` and the newest `keep - 1` checkpoints of other steps."""
    same = latest.name.partition(".")[0]
    others = [path for path in finished_in(latest.parent) if path != latest]
    kept = [path for path in others if path.name.partition(".")[0] != same][: keep - 1]
    for path in others:
        if path not in kept:
            dying = path.with_name(path.name + UNFINISHED)
            path.rename(dying)  # a partly deleted checkpoint has no valid name
            discard(dying)


def finished_in(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, newest first."""
    paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and finished(path)]
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def finished(path: Path) -> bool:
    """Whether the save finished: metadata is written last."""
    return (path / METADATA).is_file()


def inside(folder: Path, name: str) -> Path:
    """The file `name` in a folder. Raises ValueError if it is outside, even if through a link."""
    way, file = PurePath(name), folder / name
    outside = way.is_absolute() or ".." in way.parts
    if outside or not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{file} is outside {folder}; a checkpoint may contain only files of its folder"
        )
    return file


def find(folder: Path) -> Path:
    """The checkpoint to load: `folder`, or the checkpoint that `latest` names. Raises ValueError if
    there is none, listing the checkpoints in `folder`."""
    if finished(folder):
        return folder
    if not folder.is_dir():
        raise ValueError(f"no checkpoint at {folder}: the folder does not exist")
    if folder.name.endswith(UNFINISHED):
        raise ValueError(
            f"{folder} is an unfinished save; load {folder.parent}, which has the last finished one"
        )
    pointer = folder / LATEST
    if not pointer.is_file():
        names = ", ".join(path.name for path in finished_in(folder))
        instead = f"; load one of its checkpoints: {names}" if names else ""
        raise ValueError(
            f"no checkpoint at {folder}: it has neither {METADATA!r} nor {LATEST!r}, so it is "
            f"not a checkpoint and no save into it was finished{instead}"
        )
    data = inside(folder, LATEST).read_bytes()
    written, _, checksum = data.partition(b"\n")
    name = written.decode(errors="replace").strip()
    damaged = checksum.strip() and not sealed(data)  # a name written by hand has no checksum
    if damaged or not NAME.fullmatch(name) or not finished(folder / name):
        names = ", ".join(path.name for path in finished_in(folder)) or "none"
        what = "is damaged" if damaged else f"names {name!r}, which is not a finished checkpoint"
        raise ValueError(f"{pointer} {what}; load one of the finished checkpoints: {names}")
    return folder / name
