"""`make gpu`: check labkit on this machine's GPUs, and measure them.

    python tests/benchmarks/gpu.py [tests] [labs] [bench] [--again]

    tests   the tests marked `gpu`
    labs    all labs, as scripts, with the device that a World picks
    bench   `labkit bench`, of what a GPU is for

Each result is written to notebooks/results when it is there, so that a run that was stopped goes
on: what has a file is skipped, unless `--again` is given. Nothing is installed.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "notebooks" / "results"
AT_A_TIME = 6  # labs; each has up to 8 ranks
BENCHES = {
    "precision": ["--turns", "9"],
    "attention": [],
    "transfers": ["--gbps", "0"],
    "data-parallel": ["--ranks", "1", "--turns", "9"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and measure labkit on this machine's GPUs.")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="tests, labs or bench; all if none"
    )
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    chosen = parser.parse_args()
    if unknown := set(chosen.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    if find_spec("torch") is None:
        sys.exit(f"labkit: {sys.executable} has no torch; choose another: make gpu PYTHON=...")
    import torch

    if not torch.cuda.is_available():
        sys.exit("labkit: torch sees no GPU here; `labkit doctor` says why")
    RESULTS.mkdir(exist_ok=True)
    name = re.sub(r"\W+", "-", torch.cuda.get_device_name()).lower()
    failed = [part for part in chosen.parts or PARTS if not PARTS[part](name, chosen.again)]
    sys.exit(f"labkit: problems in {', '.join(failed)}" if failed else 0)


def about() -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(),
        "torch": torch.__version__, "cuda": torch.version.cuda,
        "python": platform.python_version(), "date": date.today().isoformat(),
    }  # fmt: skip


def run(command: list[str], log: Path | None = None) -> tuple[int, float]:
    """The exit status and the seconds of a Python command."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
    env |= {"OMP_NUM_THREADS": "2"}  # several labs and tests run at the same time
    began_s = time.monotonic()
    with open(log or os.devnull, "w") as file:
        out = {} if log is None else {"stdout": file, "stderr": subprocess.STDOUT}
        status = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, **out).returncode
    return status, time.monotonic() - began_s


def write(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def tests(name: str, again: bool) -> bool:
    path = RESULTS / f"tests-{name}.json"
    if path.exists() and not again:
        return True
    workers = ["-n", "4", "--dist", "worksteal"] if find_spec("xdist") else []
    log = ROOT / "runs" / "gpu-tests.log"
    log.parent.mkdir(exist_ok=True)
    status, seconds = run(["-m", "pytest", "-m", "gpu", *workers], log)
    print(log.read_text()[-3000:])
    counts = {
        word: int(n)
        for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", log.read_text())
    }
    write(path, {"about": about(), "tests": counts, "seconds": round(seconds, 1)})
    return status == 0


def labs(name: str, again: bool) -> bool:
    path = RESULTS / f"labs-{name}.json"
    done: dict[str, Any] = (
        {} if again or not path.exists() else json.loads(path.read_text())["labs"]
    )
    sources = sorted((ROOT / "notebooks" / "src").glob("[0-9][0-9]_*/lab.py"))
    logs = ROOT / "runs" / "gpu-labs"
    logs.mkdir(parents=True, exist_ok=True)

    def one(number: str) -> bool:
        if done.get(number, {}).get("problems") == 0:
            return True
        log = logs / f"{number}.log"
        status, seconds = run(["notebooks/src/as_script.py", number], log)
        problems = log.read_text(errors="replace").count("\n@@@ cell") or int(status != 0)
        done[number] = {"problems": problems, "seconds": round(seconds, 1)}
        write(path, {"about": about(), "labs": dict(sorted(done.items()))})
        print(f"lab {number}: {problems} problems, {seconds:.0f} s", flush=True)
        return problems == 0

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        numbers = [source.parent.name[:2] for source in reversed(sources)]  # the longest first
        return all(list(pool.map(one, numbers)))


def bench(name: str, again: bool) -> bool:
    good = True
    for what, options in BENCHES.items():
        path = RESULTS / f"{what}-{name}.json"
        if again or not path.exists():
            status, seconds = run(["-m", "labkit", "bench", what, *options, "--save", str(path)])
            print(f"labkit bench {what}: {seconds:.0f} s", flush=True)
            good &= status == 0
    return good


PARTS = {"tests": tests, "labs": labs, "bench": bench}

if __name__ == "__main__":
    main()
