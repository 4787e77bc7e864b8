"""The folders of a world: one for sockets, the board and files, one whose files are memory."""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

MEMORY = Path("/dev/shm")  # on Linux: a file there is memory and never touches a disk


def memory_folder(beside: str) -> str:
    """A new folder for files that ranks map into their memory; `beside`, an ordinary folder, where
    the system has no better one."""
    try:
        return tempfile.mkdtemp(prefix=f"labkit-{os.getpid()}-", dir=MEMORY)  # whose it is
    except OSError:  # there is none, or not for us
        return beside


def remove(folders: Iterable[str]) -> None:
    """Delete these folders, those that are there."""
    for folder in filter(None, folders):
        shutil.rmtree(folder, ignore_errors=True)
