"""The folders of a world: one for sockets, the board and files, and one in shared memory."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

MEMORY = Path("/dev/shm")  # on Linux, a file system in memory


def new_folder(register: Callable[[str], None], place: str | Path | None = None) -> str:
    """Create a folder that only this user can enter. `register` is called with the path before the
    folder exists, so that the folder is removed even after a crash."""
    name = f"labkit-{os.getpid()}-{secrets.token_hex(4)}"  # names the owning process
    folder = str(Path(place or tempfile.gettempdir()) / name)
    register(folder)
    os.mkdir(folder, 0o700)
    return folder


def memory_folder(register: Callable[[str], None], beside: str) -> str:
    """Create a folder for files that ranks map into memory; without /dev/shm, return `beside`."""
    try:
        return new_folder(register, MEMORY)
    except OSError:  # /dev/shm does not exist or is not writable
        return beside


def remove(folders: Iterable[str]) -> None:
    """Delete these folders if they exist. Retries, since a dying rank may still write to them."""
    for folder in filter(None, folders):
        for _ in range(5):
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.lexists(folder):
                break
            time.sleep(0.02)
