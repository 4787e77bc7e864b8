"""What a user can do with labkit, written down: run before a change and after it, then compare.

    python tests/support/freeze.py FOLDER
    diff -r BEFORE AFTER

FOLDER then has names.txt (public names with signatures), commands.txt (commands with options),
files.txt (what a run and a checkpoint consist of), labs/NN.txt (cells with their tagged outputs),
tests.txt (test ids), and a run and a checkpoint themselves, which later versions must open.
tests/data/frozen.tar.gz is such a folder, of the last version in one drawer (tests/test_frozen.py).
"""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from places import ROOT

TEMPORARY = re.compile(r"0x[0-9a-f]+")
MODULE = re.compile(r"\blabkit\.(?:\w+\.)*(?=\w)")  # a module path before a name


def names() -> Iterator[str]:
    """Public names, and the public methods and properties of the classes among them."""
    import labkit

    for name in sorted(labkit.__all__):
        thing = getattr(labkit, name)
        if not inspect.isclass(thing):
            yield f"{name}{_signature(thing)}" if callable(thing) else f"{name}: {type(thing)}"
            continue
        yield f"class {name}{_signature(thing)}"
        for method in sorted(dir(thing)):
            owner = next(c for c in thing.__mro__ if method in vars(c) or c is object)
            if method.startswith("_") or not owner.__module__.startswith("labkit"):
                continue
            found = inspect.getattr_static(thing, method)
            kind = type(found).__name__
            found = getattr(found, "__func__", found)
            yield f"  {name}.{method}{_signature(found) if callable(found) else ': ' + kind}"


def _signature(thing: Any) -> str:
    try:
        return MODULE.sub("", TEMPORARY.sub("...", str(inspect.signature(thing))))
    except (TypeError, ValueError):
        return "(...)"


def commands() -> Iterator[str]:
    """Every command with its arguments and options, defaults and limits."""
    import typer

    from labkit.cli import app

    def walk(command: Any, path: str) -> Iterator[str]:
        for param in sorted(command.params, key=lambda x: x.name):
            spelled = " ".join(sorted([*param.opts, *param.secondary_opts]))
            limits = [getattr(param, name, None) for name in ("min", "max", "required")]
            yield f"{path} {spelled} default={param.default!r} limits={limits}"
        for name in sorted(getattr(command, "commands", {})):
            yield f"{path} {name}"
            yield from walk(command.commands[name], f"{path} {name}")

    yield from walk(typer.main.get_command(app), "labkit")


def labs() -> Iterator[tuple[str, str]]:
    """The cells of each solved lab, with the outputs of those that are compared."""
    import nbformat

    for path in sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb")):
        lines = []
        for cell in nbformat.read(path, as_version=4).cells:
            lines.append(f"--- {cell.cell_type} {' '.join(cell.metadata.get('tags', []))}".rstrip())
            lines.append(cell.source)
            if "nbval-check-output" in cell.metadata.get("tags", []):
                for output in cell.outputs:
                    text = output.get("text") or output.get("data", {}).get("text/plain", "")
                    lines.append("==> " + TEMPORARY.sub("...", text))
        yield path.stem, "\n".join(lines) + "\n"


def test_ids() -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(line for line in done.stdout.splitlines() if "::" in line)


def write_run_and_checkpoint(folder: Path) -> Iterator[str]:
    """Two ranks train, record and save; what their files hold, without its numbers."""
    import torch

    from labkit import World, ZeroOptimizer, record, save_checkpoint

    def train(where: str) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 3)
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=1, lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).pow(2).mean().backward()
            optimizer.step()
        save_checkpoint(where, model, optimizer, step=2, extra={"seed": 3})

    with World(2, backend="gloo") as world, record(folder / "run", 1, what="frozen"):
        world.run(train, str(folder / "checkpoints"))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(folder))
    about = json.loads((folder / "run" / "run.json").read_text())
    yield "run.json: " + ", ".join(sorted(about))
    header = json.loads(next((folder / "run").glob("rank0*")).read_text().splitlines()[0])
    yield "rank0: " + json.dumps(header.get("columns"), sort_keys=True)


def write(folder: Path) -> None:
    (folder / "labs").mkdir(parents=True)
    for name, lines in (("names", names()), ("commands", commands()), ("tests", test_ids())):
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    for lab, text in labs():
        (folder / "labs" / f"{lab}.txt").write_text(text)
    files = write_run_and_checkpoint(folder / "made")
    (folder / "files.txt").write_text("\n".join(files) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
