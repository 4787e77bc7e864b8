"""Seeded damage to the files that users bring, and what reads them afterwards.

Run as a program it reads damaged files under a limit of memory and of time for each, so that a
fault in labkit ends this process and not the machine:

    python tests/support/damage.py runs BASE FIRST COUNT DRAW_EVERY
    python tests/support/damage.py files FIRST COUNT

It prints one JSON object: how many were read and refused, and the faults.
"""

import copy
import faulthandler
import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

MEMORY_BYTES, SECONDS = 3 << 30, 60
SECRET = "not to be touched"

NESTED: list[Any] = []
for _ in range(400):
    NESTED = [NESTED]
HOSTILE: list[Any] = [
    None, True, False, -1, 0, 1, 7, 2**31, 2**59, 2**63, -(2**63), 10**12, 10**400, 1e-320, 3e9,
    1e12, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), "", " ", "text", "[/x]",
    "[nope]", "[bold red]x", "\x1b[31mred\x1b]0;title\x07\x9b1m", "$\\frac{$", "\ud800",
    "a\nb\rc\x00", "\u202etxt", "../../x", "0:1000000000000:1", "0:10:0", "9:1:-1", "0:100000:1",
    "1:2:3:4", "user", "send", [], {}, [0], [1, 0], [0, 0], [-1, 99], [10**400], ["x"], NESTED,
    {"a": {"b": [1]}}, {"gbps": "x"}, {"inside": 1}, "x" * 50_000, [0] * 20_000,
]  # fmt: skip


# ---- damage


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from places(part, (*path, i))


def another_value(data: bytes, chance: Random) -> bytes:
    try:
        value = json.loads(data)
    except ValueError:
        return data
    *path, last = chance.choice(list(places(value))[1:] or [(None,)])
    new = copy.deepcopy(chance.choice(HOSTILE))
    if last is None:
        return json.dumps(new).encode()
    at = value
    for key in path:
        at = at[key]
    at[last] = new
    return json.dumps(value).encode()


def flip(data: bytes, chance: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 4]) if data else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(data: bytes, chance: Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def shuffle_lines(data: bytes, chance: Random) -> bytes:
    """A line dropped, doubled, moved or cut, or all behind it dropped."""
    lines = data.split(b"\n")
    i, j = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(5):
        case 0:
            del lines[i]
        case 1:
            lines.insert(j, lines[i])
        case 2:
            lines[i], lines[j] = lines[j], lines[i]
        case 3:
            lines[i] = cut(lines[i], chance)
        case _:
            lines = lines[:i]
    return b"\n".join(lines)


def one_field(data: bytes, chance: Random) -> bytes:
    """Other values in some lines, often in the first."""
    lines = data.split(b"\n")
    for _ in range(chance.choice([1, 1, 5])):
        i = chance.choice([0, chance.randrange(len(lines)), chance.randrange(len(lines))])
        lines[i] = another_value(lines[i], chance)
    return b"\n".join(lines)


def one_column(data: bytes, chance: Random) -> bytes:
    """The same other value in a column of all lines of a kind."""
    new = chance.choice(HOSTILE)
    try:
        rows = [json.loads(line) for line in data.split(b"\n") if line]
    except ValueError:
        return data
    kinds = sorted({row[0] for row in rows if isinstance(row, list)})
    if kinds:
        kind, at = chance.choice(kinds), chance.randrange(1, 12)
        for row in rows:
            if isinstance(row, list) and row[0] == kind and at < len(row):
                row[at] = new
    elif rows:
        key = chance.choice(sorted(rows[0]))
        for row in rows:
            row[key] = new
    return b"\n".join(json.dumps(row).encode() for row in rows)


def replace_file(path: Path, outside: Path, chance: Random) -> None:
    """Something else in place of the file."""
    path.unlink()
    match chance.randrange(8):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to(path)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            path.symlink_to("/nowhere")
        case 5:
            path.symlink_to(outside)
        case 6:
            here = os.getcwd()
            os.chdir(path.parent)  # the name of a socket is short
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
            os.chdir(here)
        case _:
            with path.open("wb") as file:
                file.truncate(1 << 40)


def damage(path: Path, outside: Path, chance: Random) -> None:
    if chance.random() < 0.12:
        return replace_file(path, outside, chance)
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        ways = [flip, cut, shuffle_lines, one_field, one_field, one_field, one_column, one_column]
    elif path.suffix == ".json":
        ways = [flip, cut, shuffle_lines, *[another_value] * 5]
    else:
        ways = [flip, cut, *[shuffle_lines] * 4]
    path.write_bytes(chance.choice(ways)(data, chance))
    return None


# ---- reading what is damaged


class Hung(BaseException):
    pass


class Outcomes:
    """What became of each reading; `faults` has those that were no reading and no sentence."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def of(self, what: str, seed: int, names: tuple[str, ...], read: Callable[[], Any]) -> Any:
        """Its value, or None where it was refused. `names`: one of them is in the sentence."""
        signal.alarm(SECONDS)
        try:
            value = read()
            self.counts[what] += 1
            return value
        except (ValueError, OSError) as error:
            self.counts[f"{what} refused"] += 1
            said = str(error)
            if not any(name in said for name in names):
                self.faults.append(f"{what} {seed}: which file? {said[:200]}")
            if len(said) > 1000:
                self.faults.append(f"{what} {seed}: {len(said)} characters")
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            self.faults.append(f"{what} {seed}: {told[:300]}")
        finally:
            signal.alarm(0)
        return None

    def print(self) -> None:
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps({"counts": self.counts, "faults": self.faults, "peak_mb": peak_mb}))


def show(shown: Any) -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120)
    console.print(shown)
    text = console.file.getvalue()
    text.encode()
    if any(not x.isprintable() and x != "\n" for x in text):
        raise AssertionError("a control character reaches the terminal")


def read_damaged_runs(base: Path, first: int, count: int, draw_every: int) -> Outcomes:
    """Read, view, export and replay a run, `count` times damaged anew."""
    from labkit import view
    from labkit.clusters import cluster
    from labkit.replaying.summary import on_clusters, table
    from labkit.trace import read_run
    from labkit.trace.chrome import write_chrome

    outcomes, wheres = Outcomes(), {"dgx-h100": cluster("dgx-h100")}
    with tempfile.TemporaryDirectory() as temporary:
        outside = Path(temporary) / "outside"
        for seed in range(first, first + count):
            chance = Random(seed)
            run = Path(temporary) / f"run{seed}"
            shutil.copytree(base, run)
            outside.write_text(SECRET)
            damage(chance.choice(sorted(run.iterdir())), outside, chance)
            trace = outcomes.of("read", seed, (str(run),), lambda run=run: read_run(run))
            if trace is not None:
                names = ("rank", "step", "trace", "run")
                for problem in trace.about.get("problems", ()):
                    if not any(
                        x in problem for x in ("run.json", "metrics.jsonl", ".jsonl", "rank")
                    ):
                        outcomes.faults.append(f"{seed}: a problem of no file: {problem}")
                for what, use in {
                    "view": lambda trace=trace: show(view.table(trace)),
                    "chrome": lambda trace=trace, run=run: write_chrome(trace, run / "c.json"),
                    "replay": lambda trace=trace: show(table(on_clusters(trace, wheres))),
                    "replay as measured": lambda trace=trace: show(
                        table(on_clusters(trace, wheres, "measured"))
                    ),
                    "draw": lambda trace=trace, run=run: view.draw(trace, run),
                }.items():
                    if what != "draw" or seed % draw_every == 0:
                        outcomes.of(what, seed, names, use)
            if outside.read_text() != SECRET:
                outcomes.faults.append(f"{seed}: wrote outside")
            shutil.rmtree(run)
    return outcomes


def read_damaged_files(sweep: Path, first: int, count: int) -> Outcomes:
    """Cluster files, logs of NCCL, tables of algorithms, sweeps."""
    import labkit
    from labkit import plot
    from labkit.bench.sweep_tables import tables
    from labkit.clusters import read_clusters
    from labkit.runtime.transports.chooser import Chooser, read_table
    from labkit.sweeps.sweep import read_sweep
    from labkit.trace.nccl_log import EXAMPLES, read_nccl_log
    from labkit.trace.nccl_log.summary import table

    root = Path(labkit.__file__).parent
    outcomes = Outcomes()

    def use_log(path: Path) -> None:
        log = read_nccl_log(path)
        if log.communicators:
            show(table(log, path.name))
            if log.main.rings or log.main.trees:
                plot.nccl(log)

    def use_table(path: Path) -> None:
        for size in (1, 2, 3, 7, 64):
            Chooser(size, read_table(path)).explain("all_reduce", 12345)

    def use_sweep(path: Path) -> None:
        for shown in tables(read_sweep(path)):
            show(shown)

    with tempfile.TemporaryDirectory() as temporary:
        outside = Path(temporary) / "outside"
        outside.write_text(SECRET)
        for what, source, use in (
            ("clusters", root / "clusters" / "known.toml", read_clusters),
            ("log", EXAMPLES["two_nodes"], use_log),
            ("table", root / "runtime" / "transports" / "table.json", use_table),
            ("sweep", sweep, use_sweep),
        ):
            for seed in range(first, first + count):
                path = Path(temporary) / f"{what}-{seed}{source.suffix}"
                shutil.copy(source, path)
                damage(path, outside, Random(seed))
                names = (path.name, "nodes, but no level between", "ranks is too large to draw")
                outcomes.of(what, seed, names, lambda use=use, path=path: use(path))
    return outcomes


def _hung(*_: object) -> None:
    raise Hung


if __name__ == "__main__":
    faulthandler.enable()
    warnings.simplefilter("ignore")  # of matplotlib: letters that its font has not
    signal.signal(signal.SIGALRM, _hung)
    kind, path, *numbers = sys.argv[1:]
    reading = read_damaged_runs if kind == "runs" else read_damaged_files
    import labkit.plot  # noqa: F401  what it maps does not count

    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MEMORY_BYTES,) * 2)
    reading(Path(path), *map(int, numbers)).print()
