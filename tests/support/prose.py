"""Extracts what people read; draws pages of it for an editor.

    python tests/support/prose.py --seed 1 --pages 20

A page is 40 lines of a file, as its reader sees them."""

import argparse
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

PAGE_LINES = 40
TEXT = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def files() -> list[Path]:
    """The package, the READMEs, every lab's checks, and the labs that are the model for style."""
    labs = [file for file in (ROOT / "notebooks/src").rglob("*.py") if file.name != "lab.py"]
    model = (ROOT / "notebooks/src").glob("0[0-3]_*/lab.py")
    pages = [*ROOT.glob("*.md"), ROOT / "notebooks/README.md"]
    return sorted([*(ROOT / "labkit").rglob("*.py"), *labs, *model, *pages])


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, comment and string; code in backticks is left out."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        texts = list(enumerate(re.sub(r"```.*?```", _blank, source, flags=re.S).splitlines(), 1))
    else:
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts = [(token.start[0], token.string) for token in tokens if token.type in TEXT]
    for line, text in texts:
        yield line, re.sub(r"`[^`]*`", "", text)


def _blank(code: re.Match[str]) -> str:
    return "\n" * code.group().count("\n")


def pages(seed: int, count: int) -> Iterator[str]:
    """`count` pages, each file as likely as it is long."""
    lines = {file: file.read_text(encoding="utf-8").splitlines() for file in files()}
    starts = [(file, n) for file in lines for n in range(0, len(lines[file]), PAGE_LINES)]
    for file, start in random.Random(seed).sample(starts, count):
        page = lines[file][start : start + PAGE_LINES]
        yield "\n".join([f"== {file.relative_to(ROOT)}:{start + 1}", *page])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print pages of labkit, drawn at random.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pages", type=int, default=20)
    chosen = parser.parse_args()
    print("\n\n".join(pages(chosen.seed, chosen.pages)))
