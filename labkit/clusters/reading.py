"""Clusters from TOML files: those that labkit knows, and your own. See known.toml for the form."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from labkit.clusters.cluster import Cluster, Device, Level
from labkit.foreign import read_file

# What a number can be, so that 300 for 300 GB/s, or 5 for 5 us, is told: least, most, what of.
PLAUSIBLE = {
    "memory_bytes": (1e8, 1e14, "bytes, not GB"),
    "memory_bytes_per_s": (1e8, 1e15, "bytes a second, not GB/s"),
    "bytes_per_s": (1e5, 1e14, "bytes a second, not GB/s"),
    "peak_flops": (1e7, 1e18, "operations a second, not TFLOP/s"),
    "launch_s": (0.0, 1e-2, "seconds, not microseconds"),
    "host_s": (0.0, 1e-2, "seconds, not microseconds"),
    "start_s": (0.0, 10.0, "seconds, not microseconds"),
    "latency_s": (0.0, 2.0, "seconds, not microseconds"),
    "tile": (0.0, 4096.0, "a side of a matrix"),
}
MAY_BE_0 = ("launch_s", "host_s", "latency_s", "start_s", "tile")


def cluster(name: str, path: str | Path | None = None) -> Cluster:
    """A cluster that labkit knows, or one of the file `path`. Raises ValueError, listing the names,
    for another, and as `read_clusters`.

    >>> cluster("dgx-h100").size
    1024
    """
    known = known_clusters() | (read_clusters(path) if path else {})
    if name not in known:
        raise ValueError(f"no cluster {name!r}; there are {', '.join(known)}")
    return known[name]


def known_clusters() -> dict[str, Cluster]:
    """Those that labkit knows, by name."""
    return _clusters(_known(), {}, "known.toml")


def read_clusters(path: str | Path) -> dict[str, Cluster]:
    """The clusters of a file of your own, by name. They may be of devices that labkit knows.

    Raises FileNotFoundError, or ValueError that says what in the file is wrong.
    """
    try:
        text = read_file(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    return clusters_in(text, str(path))


def clusters_in(text: str, where: str) -> dict[str, Cluster]:
    """As `read_clusters`, of a file's text; `where` is what errors call it."""
    try:
        told = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is no TOML: {error}") from None
    return _clusters(told, _known()["devices"], where)


@cache
def _known() -> dict[str, Any]:
    text = files("labkit.clusters").joinpath("known.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _clusters(
    told: Mapping[str, Any], devices: Mapping[str, Any], where: str
) -> dict[str, Cluster]:
    _no_others(told, {"devices", "clusters"}, where)
    tables = {**devices, **_table(told.get("devices", {}), f"{where}: devices")}
    found = {}
    for name, table in _table(told.get("clusters"), f"{where}: clusters").items():
        found[name] = _cluster(name, table, tables, f"{where}: clusters.{name}")
    return found


def _cluster(name: str, told: Any, devices: Mapping[str, Any], where: str) -> Cluster:
    told = _table(told, where)
    _no_others(told, {"title", "device", "nodes", "levels"}, where)
    device = told.get("device")
    if not isinstance(device, str) or device not in devices:
        raise ValueError(f"{where}: no device {device!r}; there are {', '.join(devices)}")
    levels = told.get("levels")
    if not (isinstance(levels, list) and 1 <= len(levels) <= 2):
        raise ValueError(f"{where}: levels: one inside a node is needed, and one between, if any")
    inside, *between = [_level(x, i == 0, f"{where}: levels[{i}]") for i, x in enumerate(levels)]
    return Cluster(
        name,
        str(told.get("title", name)),
        _device(devices[device], f"{where}: device {device}"),
        _whole(told, "nodes", where),
        _whole(levels[0], "devices", f"{where}: levels[0]"),
        inside,
        *between,
    )


def _device(told: Any, where: str) -> Device:
    told = _table(told, where)
    plain = ("memory_bytes", "memory_bytes_per_s", "launch_s")
    parts = ("matmul_reached", "memory_reached", "tile", "host_s")
    _no_others(told, {"name", "peak_flops", *plain, *parts}, where)
    numbers, sources = _numbers(told, (*plain, *_given(told, parts)), where)
    rates = _table(told.get("peak_flops"), f"{where}: peak_flops")
    peak_flops, more = _numbers(rates, tuple(rates), f"{where}: peak_flops", "peak_flops")
    if not peak_flops:
        raise ValueError(
            f"{where}: no rate of any dtype; give one: "
            'peak_flops.bfloat16 = [312e12, "who says so"]'
        )
    sources |= {f"peak_flops.{dtype}": source for dtype, source in more.items()}
    return Device(str(told.get("name", where)), peak_flops, **numbers, sources=sources)


def _level(told: Any, inside: bool, where: str) -> Level:
    told = _table(told, where)
    counts = {"ports", "devices"} if inside else {"ports"}
    parts = ("reached", "start_s")
    _no_others(told, {"name", "bytes_per_s", "latency_s", *counts, *parts}, where)
    names = ("bytes_per_s", "latency_s", *_given(told, parts))
    numbers, sources = _numbers(told, names, where)
    name = str(told.get("name", "wires"))
    return Level(name, **numbers, ports=_whole(told, "ports", where), sources=sources)


def _numbers(
    told: Mapping[str, Any], names: tuple[str, ...], where: str, kind: str | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """Numbers and their sources. Some may be 0; a part is no more than the whole; the others, which
    are of one `kind` or each of its own, must be plausible."""
    numbers, sources = {}, {}
    for name in names:
        match told.get(name):
            case [int() | float() as number, str() as source] if _is_real(number) and source:
                if number < 0 or (number == 0 and name not in MAY_BE_0):
                    raise ValueError(f"{where}: {name} = {number}; more than 0 is needed")
                if name.endswith("reached") and number > 1:
                    raise ValueError(f"{where}: {name} = {number}; it is a part: 1 at most")
                _check_plausible(kind or name, number, f"{where}: {name}")
                numbers[name], sources[name] = float(number), source
            case other:
                raise ValueError(
                    f"{where}: {name} = {other!r}; a number and its source are needed: "
                    f'{name} = [1e9, "who says so"]'
                )
    return numbers, sources


def _check_plausible(kind: str, number: float, what: str) -> None:
    least, most, unit = PLAUSIBLE.get(kind, (0.0, float("inf"), ""))
    if not least <= number <= most:
        raise ValueError(
            f"{what} = {number:g}, which no cluster has: {least:g} to {most:g} is plausible "
            f"({unit})"
        )


def _given(told: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of these numbers, which have a default, that are there."""
    return tuple(name for name in names if name in told)


def _is_real(number: float) -> bool:
    return not isinstance(number, bool) and abs(number) <= 1e300


def _whole(told: Mapping[str, Any], name: str, where: str) -> int:
    number = told.get(name)
    if type(number) is not int or number < 1:
        raise ValueError(f"{where}: {name} = {number!r}; a whole number of 1 or more is needed")
    return number


def _table(told: Any, where: str) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise ValueError(f"{where}: a table is needed, not {told!r}")
    return told


def _no_others(told: Mapping[str, Any], names: set[str], where: str) -> None:
    if others := told.keys() - names:
        raise ValueError(
            f"{where}: {sorted(others)[0]!r} is not known; there are {', '.join(sorted(names))}"
        )
