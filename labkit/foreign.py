"""Untrusted files and texts: read with a size limit, shown as plain text."""

import json
import os
from pathlib import Path

from rich.markup import escape

MAX_BYTES = 1 << 30  # largest file to read whole
PICTURES = (".png", ".pdf", ".svg", ".jpg")


def read_file(path: str | Path) -> bytes:
    """Read a regular file. Raises OSError, or ValueError if it is not regular or exceeds 1 GiB."""
    path = Path(path)
    nbytes = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is a folder, FIFO, socket or device; choose a regular file")
    if nbytes > MAX_BYTES:
        raise ValueError(f"{path} has {nbytes:,} bytes; choose a file of at most {MAX_BYTES:,}")
    return path.read_bytes()


def write_json(path: str | Path, contents: object) -> Path:
    """Write a JSON file, creating its folder if necessary; return the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return path


def check_output(path: Path | None) -> Path | None:
    """Return `path`. Raises ValueError if no file can be written there or if it is a link, which in
    another user's folder could make labkit overwrite an unrelated file."""
    if path is None:
        return None
    for wrong, why in (
        (path.is_symlink(), "is a link, and labkit does not write through links"),
        (path.is_dir(), "is a folder"),
        (
            not path.parent.is_dir(),
            f"cannot be written: the folder {path.parent} does not exist",
        ),
        (path.exists() and not path.is_file(), "is not a regular file"),
        (not os.access(path if path.exists() else path.parent, os.W_OK), "is not writable"),
    ):
        if wrong:
            raise ValueError(f"{path} {why}; choose a file that can be written")
    return path


def check_picture(path: Path | None) -> Path | None:
    """Like `check_output`, but the name must also end in a picture format's extension."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise ValueError(f"{path}: a picture's name must end in one of {', '.join(PICTURES)}")
    return check_output(path)


def plain(text: object) -> str:
    """`text` for a terminal: escape sequences and other control characters are spelled out."""
    return "".join(
        x if x.isprintable() or x in "\n\t" else x.encode("unicode_escape").decode()
        for x in str(text)
    )


def brief(error: object) -> str:
    """The first 500 characters of an error's plain text, for a message about a file."""
    return plain(error)[:500]


def markup(text: object) -> str:
    """`plain(text)` for rich, with each [tag] escaped."""
    return escape(plain(text))


def literal(text: str) -> str:
    """`plain(text)` on one line for matplotlib, with each $ escaped."""
    return " ".join(plain(text).split()).replace("$", r"\$")
