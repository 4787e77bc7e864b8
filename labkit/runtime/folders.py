"""The folders of a world: one for sockets, the board and files, one whose files are memory."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

MEMORY = Path("/dev/shm")  # on Linux: a file there is memory and never touches a disk


def new_folder(register: Callable[[str], None], place: str | Path | None = None) -> str:
    """A new folder that only this user can enter. `register` gets its name before it exists, so
    that it is removed after a crash at any moment."""
    name = f"labkit-{os.getpid()}-{secrets.token_hex(4)}"  # whose it is
    folder = str(Path(place or tempfile.gettempdir()) / name)
    register(folder)
    os.mkdir(folder, 0o700)
    return folder


def memory_folder(register: Callable[[str], None], beside: str) -> str:
    """A new folder for files that ranks map into their memory; `beside`, an ordinary folder, where
    the system has no better one."""
    try:
        return new_folder(register, MEMORY)
    except OSError:  # there is none, or not for us
        return beside


def remove(folders: Iterable[str]) -> None:
    """Delete these folders, those that are there. A rank that is being killed may write a file
    while its folder is emptied: then once more."""
    for folder in filter(None, folders):
        for _ in range(5):
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.lexists(folder):
                break
            time.sleep(0.02)
