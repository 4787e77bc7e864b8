"""What a user can do with labkit, written down: run before a change and after it, then compare.

    PYTHONPATH=tests/support python tests/benchmarks/freeze_folder.py FOLDER
    diff -r BEFORE AFTER

FOLDER then has names.txt (public names with signatures), commands.txt (commands with options),
files.txt (what a run and a checkpoint consist of), tests.txt (test ids), and a run and a checkpoint
themselves, which later versions must open. (Cells and outputs of labs are in notebooks/solutions.)
tests/data/frozen.tar.gz is such a folder, of the last version in one drawer (tests/test_frozen.py).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from freeze import commands, names
from places import ROOT


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
    folder.mkdir(parents=True)
    for name, lines in (("names", names()), ("commands", commands()), ("tests", test_ids())):
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    files = write_run_and_checkpoint(folder / "made")
    (folder / "files.txt").write_text("\n".join(files) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
