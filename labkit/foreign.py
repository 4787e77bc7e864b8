"""Files and texts from other people: read within bounds, shown as plain text."""

import json
import os
from pathlib import Path

from rich.markup import escape

MOST_BYTES = 1 << 30  # of a file that is read whole
PICTURES = (".png", ".pdf", ".svg", ".jpg")


def read_file(path: str | Path) -> bytes:
    """The bytes of a regular file. Raises OSError, and ValueError for a folder, a FIFO, a device,
    or more than 1 GiB."""
    path = Path(path)
    nbytes = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file, but a folder, FIFO, socket or device")
    if nbytes > MOST_BYTES:
        raise ValueError(f"{path} has {nbytes:,} bytes; at most {MOST_BYTES:,} are read")
    return path.read_bytes()


def write_json(path: str | Path, contents: object) -> Path:
    """Write a file of JSON, and its folder where that is missing; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return path


def check_output(path: Path | None) -> Path | None:
    """Returns `path`. Raises ValueError where no file can be written, and for a link: what a link
    in another person's folder points to must not be overwritten."""
    if path is None:
        return None
    for wrong, why in (
        (path.is_symlink(), "is a link, through which labkit does not write"),
        (path.is_dir(), "is a folder"),
        (not path.parent.is_dir(), f"cannot be written: there is no folder {path.parent}"),
        (path.exists() and not path.is_file(), "is not a regular file"),
        (not os.access(path if path.exists() else path.parent, os.W_OK), "may not be written"),
    ):
        if wrong:
            raise ValueError(f"{path} {why}; give the name of a file that can be written")
    return path


def check_picture(path: Path | None) -> Path | None:
    """As `check_output`, and its name must end in a format of pictures."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise ValueError(f"{path}: the name of a picture ends in one of {', '.join(PICTURES)}")
    return check_output(path)


def plain(text: object) -> str:
    """`text` for a terminal: escape sequences and other control characters are spelled out."""
    return "".join(
        x if x.isprintable() or x in "\n\t" else x.encode("unicode_escape").decode()
        for x in str(text)
    )


def brief(error: object) -> str:
    """As much of an error's text as a sentence about a file has room for."""
    return plain(error)[:500]


def markup(text: object) -> str:
    """`plain(text)` for rich, which then takes no [tag] in it as its own."""
    return escape(plain(text))


def literal(text: str) -> str:
    """`plain(text)` in one line for matplotlib, which then sets no formula between two $."""
    return " ".join(plain(text).split()).replace("$", r"\$")
