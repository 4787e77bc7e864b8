"""A recorded run as a folder, readable even if the run was interrupted.

    run.json         program and environment of the run; written first
    rank0.jsonl ...  records, one file per rank (labkit/trace/rankfile.py)
    metrics.jsonl    one line per `metric` call on a rank: {"step": 3, "rank": 0, "loss": 2.1}

Ranks on one host share its monotonic clock. Hosts are aligned by Unix time, so times on different
hosts agree as closely as the hosts' clocks: to about a millisecond with NTP.
"""

import json
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

from labkit import __version__
from labkit.foreign import read_file
from labkit.trace.graph import RankTrace, Trace, earlier
from labkit.trace.rankfile import MAX_INT, MAX_RANKS, RankFile, read_rank_file

FORMAT = 1
RUN, METRICS = "run.json", "metrics.jsonl"
RANK_FILE = re.compile(r"rank(0|[1-9]\d*)\.jsonl")


def begin_run(path: str | Path, about: dict[str, Any] | None = None, replace: bool = False) -> Path:
    """Create a run folder, write its `run.json`, and return the folder.

    Args:
        about: entries for `run.json`, such as {"what": "ddp", "seed": 0}. These entries extend or
            override the environment (host, platform, versions, command, start time).
        replace: remove an existing run; unrelated files are never removed.

    Raises ValueError if `path` is a file, or contains unrelated files or (unless `replace`) a run.
    """
    path = Path(path)
    if path.is_dir() and any(path.iterdir()):
        _read_about(path)
        if not replace:
            raise ValueError(f"{path} already contains a run; choose a new folder, or replace=True")
        for file in path.iterdir():
            if file.name in (RUN, METRICS) or RANK_FILE.fullmatch(file.name):
                file.unlink()
    elif path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose a folder for the run")
    path.mkdir(parents=True, exist_ok=True)
    _write_about(path, {**_environment(), **(about or {}), "format": FORMAT})
    (path / METRICS).touch()
    return path


def gather(path: str | Path, parts: Iterable[str | Path]) -> list[str]:
    """Add to the run in `path` the files of ranks that other hosts have recorded into `parts`, as
    after a crash; returns the names of the ranks' files. Raises ValueError if one of these folders
    has no run, or if a rank's file would be overwritten."""
    path, added = Path(path), list[str]()
    _read_about(path)
    for part in map(Path, parts):
        _read_about(part)
        files = sorted(file for file in part.iterdir() if RANK_FILE.fullmatch(file.name))
        if there := [file.name for file in files if (path / file.name).exists()]:
            raise ValueError(f"{path} already has {', '.join(there)}; was {part} gathered before?")
        for file in files:
            shutil.copy2(file, path)
        with (path / METRICS).open("ab") as metrics:
            metrics.write((part / METRICS).read_bytes())
        added += [file.name for file in files]
    return added


def add_about(path: str | Path, **more: Any) -> None:
    """Add entries to `run.json` in the folder `path`."""
    _write_about(Path(path), {**_read_about(Path(path)), **more})


def _write_about(path: Path, about: dict[str, Any]) -> None:
    text = json.dumps(about, indent=2, ensure_ascii=False, default=str)
    (path / RUN).write_text(text + "\n", encoding="utf-8")


def add_metrics(path: str | Path, notes: Iterable[dict[str, Any]]) -> None:
    """Append metrics to the run in the folder `path`; ranks may append concurrently."""
    lines = "".join(json.dumps(note, default=float) + "\n" for note in notes)
    with (Path(path) / METRICS).open("ab") as file:
        file.write(lines.encode())  # a single write, so that lines of different ranks do not mix


def write_run(trace: Trace, path: str | Path, replace: bool = False) -> Path:
    """Write a trace as a run folder for `read_run`. Raises the errors of `begin_run`."""
    about = {key: value for key, value in trace.about.items() if key != "problems"}
    path = begin_run(path, {"world_size": trace.size, **about}, replace)
    for rank in trace.ranks.values():
        file = RankFile(path, rank, clock=(0.0, 0.0))
        file.append(chain(*rank.lists()))
        if rank.complete:
            file.mark_end()
        file.close()
    add_metrics(path, trace.metrics)
    return path


def read_run(path: str | Path) -> Trace:
    """Read the run in the folder `path`, with all ranks on one clock that begins at 0 s.

    The readable part of a damaged or unfinished run is returned: `complete` is False on incomplete
    ranks, and `about["problems"]` lists the problems.

    Raises FileNotFoundError if there is no folder, ValueError if it has no run of a known format.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no run folder at {path}; check the path")
    about = _read_about(path)
    if about.pop("format") > FORMAT:
        raise ValueError(
            f"{path} was recorded by labkit {about['labkit']} in a newer format; this labkit "
            f"({__version__}) cannot read it: pip install -U labkit"
        )
    problems = _drop_invalid(about)
    ranks = _read_ranks(path, about.get("world_size"), problems)
    metrics = _read_metrics(path / METRICS, problems)
    if problems:
        about["problems"] = problems
    return Trace(ranks, about, metrics).from_zero()


def _read_about(path: Path) -> dict[str, Any]:
    """The contents of `run.json`. Raises ValueError if the folder contains no labkit run."""
    wrong = f"{path} is not a labkit run"
    try:
        about = json.loads(read_file(path / RUN))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{wrong}: it has no {RUN}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wrong}: its {RUN} is not JSON ({error})") from None
    known = isinstance(about, dict) and "labkit" in about and isinstance(about.get("format"), int)
    if not known:
        raise ValueError(f"{wrong}: another program wrote its {RUN}")
    return about


def _drop_invalid(about: dict[str, Any]) -> list[str]:
    """Remove invalid entries that labkit would use; return one sentence per removed entry."""
    about.pop("problems", None)  # added by `read_run`, not recorded
    size, link, predicted = (about.get(name) for name in ("world_size", "link", "predicted"))
    levels = [link]
    if isinstance(link, dict) and "inside" in link:
        levels = [link["inside"], link.get("between")]
    sizes = predicted.values() if isinstance(predicted, dict) else [predicted]
    correct = {
        "world_size": type(size) is int and 0 < size <= MAX_RANKS,
        "link": all(isinstance(x, dict) and _is_number(x.get("gbps")) for x in levels),
        "predicted": all(map(_is_number, sizes)),
    }
    wrong = [name for name in correct if not correct[name] and about.pop(name, None) is not None]
    return [f"{RUN}: {name} cannot be read and is left out" for name in wrong]


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= MAX_INT)


def _environment() -> dict[str, Any]:
    try:
        torch_version = version("torch")  # from metadata: this module must not import torch
    except PackageNotFoundError:
        torch_version = "none"
    return {
        "labkit": __version__,
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch_version,
        "command": shlex.join(sys.argv),
        "started_at": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _read_ranks(path: Path, world_size: int | None, problems: list[str]) -> dict[int, RankTrace]:
    """Global rank -> trace, with times on the monotonic clock of the first rank's host."""
    numbers = {f.name: int(m[1]) for f in path.iterdir() if (m := RANK_FILE.fullmatch(f.name))}
    ranks: dict[int, RankTrace] = {}
    offsets_s: dict[str, float] = {}  # host -> Unix time minus monotonic time
    for name in sorted(numbers, key=numbers.__getitem__):
        try:
            trace, offset_s, of_rank = read_rank_file(path / name)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        problems += of_rank
        offset_s = offsets_s.setdefault(trace.host, offset_s)
        later_s = offset_s - next(iter(offsets_s.values()))
        ranks[trace.rank] = earlier(trace, -later_s) if later_s else trace
    size = max((rank.size for rank in ranks.values()), default=world_size)
    absent = sorted(set(range(size or 0)) - set(numbers.values()))
    if not numbers:
        problems.append("no rank has written anything")
    else:
        problems += [f"rank{rank}.jsonl is missing" for rank in absent[:8]]
        problems += [f"{len(absent) - 8:,} more ranks have no file"] * (len(absent) > 8)
    return ranks


def _read_metrics(file: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        lines = read_file(file).splitlines()
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        problems.append(f"{METRICS} " + ("is missing" if missing else f"cannot be read: {error}"))
        return []
    notes, unreadable = [], []
    for i, line in enumerate(lines, start=1):
        try:
            note = json.loads(line)
            known = [note.get(name, 0) for name in ("step", "rank", "loss")]
            if not all(map(_is_number, known)) or known[0] != known[0]:
                raise ValueError("not a metric")
            notes.append(note)
        except (ValueError, AttributeError, RecursionError):
            unreadable.append(i)
    problems += [f"{METRICS}: line {i} cannot be read and is left out" for i in unreadable[:3]]
    return notes
