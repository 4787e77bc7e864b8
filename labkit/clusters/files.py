"""Clusters in TOML files: labkit's own (known.toml, which shows the format), and yours. A file is
validated before it is written, and reads back unchanged."""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from decimal import Decimal
from functools import cache
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from typing import Any

from labkit.clusters.cluster import Cluster, Device, Level
from labkit.foreign import read_file

# Plausible ranges (lowest, highest, unit), to reject 300 for 300 GB/s, or 5 for 5 µs.
PLAUSIBLE = {
    "memory_bytes": (1e8, 1e14, "bytes, not GB"),
    "memory_bytes_per_s": (1e8, 1e15, "bytes per second, not GB/s"),
    "bytes_per_s": (1e5, 1e14, "bytes per second, not GB/s"),
    "peak_flops": (1e7, 1e18, "FLOP/s, not TFLOP/s"),
    "launch_s": (0.0, 1e-2, "seconds, not microseconds"),
    "host_s": (0.0, 1e-2, "seconds, not microseconds"),
    "start_s": (0.0, 10.0, "seconds, not microseconds"),
    "latency_s": (0.0, 2.0, "seconds, not microseconds"),
    "tile": (0.0, 4096.0, "elements along one dimension"),
}
DEFAULTS: dict[type, dict[str, Any]] = {  # per class and numeric field; MISSING if required
    kind: {f.name: f.default for f in fields(kind) if f.type is float} for kind in (Device, Level)
}


def cluster(name: str, path: str | Path | None = None) -> Cluster:
    """A known cluster, or a cluster from the file `path`. Raises ValueError (listing the names) if
    none matches, and the errors of `read_clusters`.

    >>> cluster("dgx-h100").size
    1024
    """
    known = known_clusters() | (read_clusters(path) if path else {})
    if name not in known:
        raise ValueError(f"no cluster {name!r}; choose one of {', '.join(known)}")
    return known[name]


def known_clusters() -> dict[str, Cluster]:
    """The clusters that labkit knows, by name."""
    return _clusters(_known(), {}, "known.toml")


def read_clusters(path: str | Path) -> dict[str, Cluster]:
    """The clusters in your own file, by name; a cluster may use labkit's known devices. Raises
    FileNotFoundError, or ValueError for an invalid file."""
    return _parse(read_file(path), path)


def write_clusters(path: str | Path, clusters: Mapping[str, Cluster]) -> None:
    """Write clusters, each under its own name, replacing the file. Raises ValueError, and writes
    nothing, if the clusters would differ when read back, e.g. if a number lacks a source.

    >>> write_clusters("clusters.toml", {"selene": cluster("selene")})
    """
    for name, written in clusters.items():
        if name != written.name:
            fix = f"make both equal: dataclasses.replace(cluster, name={name!r})"
            raise ValueError(f"the cluster under {name!r} is named {written.name!r}; {fix}")
    if not clusters:
        raise ValueError(f"{path}: no cluster to write; pass at least one")
    data = "".join(f"{line}\n" for line in _lines(clusters)).encode()
    if _parse(data, path) != dict(clusters):
        raise ValueError(
            f"{path}: these clusters would not read back equal; add a source for each number, and "
            "remove other sources"
        )
    Path(path).write_bytes(data)


# --- reading ---


@cache
def _known() -> dict[str, Any]:
    text = files("labkit.clusters").joinpath("known.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _parse(data: bytes, path: str | Path) -> dict[str, Cluster]:
    try:
        contents = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    return _clusters(contents, _known()["devices"], str(path))


def _clusters(
    contents: Mapping[str, Any], devices: Mapping[str, Any], where: str
) -> dict[str, Cluster]:
    _table(contents, where, ["devices", "clusters"])
    devices = {**devices, **_table(contents.get("devices", {}), f"{where}: devices")}
    tables = _table(contents.get("clusters"), f"{where}: clusters")
    return {
        name: _cluster(name, table, devices, f"{where}: clusters.{name}")
        for name, table in tables.items()
    }


def _cluster(name: str, table: Any, devices: Mapping[str, Any], where: str) -> Cluster:
    _table(table, where, ["title", "device", "nodes", "levels"])
    device, levels = table.get("device"), table.get("levels")
    if not isinstance(device, str) or device not in devices:
        raise ValueError(f"{where}: no device {device!r}; choose one of {', '.join(devices)}")
    if not (isinstance(levels, list) and 1 <= len(levels) <= 2):
        raise ValueError(f"{where}: expected one or two levels: inside nodes, and between nodes")
    inside, *between = [_level(x, i == 0, f"{where}: levels[{i}]") for i, x in enumerate(levels)]
    return Cluster(
        name,
        str(table.get("title", name)),
        _device(devices[device], f"{where}: device {device}"),
        _count(table, "nodes", where),
        _count(levels[0], "devices", f"{where}: levels[0]"),
        inside,
        *between,
    )


def _device(table: Any, where: str) -> Device:
    _table(table, where, ["name", "peak_flops", *DEFAULTS[Device]])
    numbers, sources = _numbers_of(Device, table, where)
    rates = _table(table.get("peak_flops"), f"{where}: peak_flops")
    if not rates:
        raise ValueError(
            f'{where}: no peak rate; add one, such as peak_flops.bfloat16 = [312e12, "source"]'
        )
    peak_flops, place = {}, f"{where}: peak_flops"
    for dtype, given in rates.items():
        rate = _number(dtype, given, place, "peak_flops")
        peak_flops[dtype], sources[f"peak_flops.{dtype}"] = rate
    return Device(str(table.get("name", where)), peak_flops, **numbers, sources=sources)


def _level(table: Any, inside: bool, where: str) -> Level:
    _table(table, where, ["name", "ports", *["devices"] * inside, *DEFAULTS[Level]])
    numbers, sources = _numbers_of(Level, table, where)
    name, ports = str(table.get("name", "links")), _count(table, "ports", where)
    return Level(name, **numbers, ports=ports, sources=sources)


def _numbers_of(
    kind: type, table: Mapping[str, Any], where: str
) -> tuple[dict[str, float], dict[str, str]]:
    numbers, sources = {}, {}
    for name, default in DEFAULTS[kind].items():
        if name in table or default is MISSING:
            numbers[name], sources[name] = _number(name, table.get(name), where, name)
    return numbers, sources


def _number(name: str, given: Any, where: str, quantity: str) -> tuple[float, str]:
    number, source = given if isinstance(given, list) and len(given) == 2 else (math.nan, "")
    numeric = type(number) in (int, float) and abs(number) <= 1e300  # NaN fails this test
    if not (numeric and isinstance(source, str) and source):
        raise ValueError(
            f"{where}: {name} = {given!r}; write a number and its source, such as "
            f'{name} = [1e9, "source"]'
        )
    lowest, highest, unit = PLAUSIBLE.get(quantity, (math.ulp(0.0), math.inf, ""))
    if number < 0 or number == 0 < lowest:
        raise ValueError(f"{where}: {name} = {number}; it must be greater than 0")
    if name.endswith("reached") and number > 1:
        raise ValueError(f"{where}: {name} = {number}; it must be a fraction, at most 1")
    if not lowest <= number <= highest:
        raise ValueError(
            f"{where}: {name} = {number:g} is not plausible; expected {lowest:g} to {highest:g} "
            f"({unit})"
        )
    return float(number), source


def _count(table: Mapping[str, Any], name: str, where: str) -> int:
    number = table.get(name)
    if type(number) is not int or number < 1:
        raise ValueError(f"{where}: {name} = {number!r}; it must be a whole number, 1 or more")
    return number


def _table(table: Any, where: str, known: Iterable[str] | None = None) -> dict[str, Any]:
    """`table`, after checking that it is a table with only `known` names."""
    if not isinstance(table, dict):
        raise ValueError(f"{where}: expected a table, not {table!r}")
    if known is not None and (others := table.keys() - set(known)):
        raise ValueError(
            f"{where}: unknown name {min(others)!r}; choose one of {', '.join(sorted(known))}"
        )
    return table


# --- writing ---


def _lines(clusters: Mapping[str, Cluster]) -> Iterator[str]:
    keys: dict[str, Device] = {}
    for written in clusters.values():
        if written.device not in keys.values():
            keys[_free_key(written.device.name, keys)] = written.device
    for key, device in keys.items():
        yield f"[devices.{key}]"
        yield f"name = {_quoted(device.name)}"
        yield from _number_lines(device, device.name)
        for dtype, rate in device.peak_flops.items():
            source = _source(device.sources, f"peak_flops.{dtype}", device.name)
            yield f"peak_flops.{_key(dtype)} = [{_digits(rate)}, {source}]"
        yield ""
    for written in clusters.values():
        table = f"clusters.{_key(written.name)}"
        device_key = next(key for key, device in keys.items() if device == written.device)
        yield f"[{table}]"
        yield f"title = {_quoted(written.title)}"
        yield f"device = {_quoted(device_key)}"
        yield f"nodes = {written.nodes}"
        for i, level in enumerate(filter(None, (written.inside, written.between))):
            yield f"[[{table}.levels]]"
            yield f"name = {_quoted(level.name)}"
            if i == 0:
                yield f"devices = {written.devices_per_node}"
            yield f"ports = {level.ports}"
            yield from _number_lines(level, f"{written.name}, {level.name}")
        yield ""


def _free_key(name: str, taken: Mapping[str, Device]) -> str:
    """The device's name in lower case, numbered if taken."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"
    keys = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(key for key in keys if key not in taken)


def _number_lines(described: Device | Level, what: str) -> Iterator[str]:
    for name, default in DEFAULTS[type(described)].items():
        number = getattr(described, name)
        if name in described.sources or number != default:
            yield f"{name} = [{_digits(number)}, {_source(described.sources, name, what)}]"


def _source(sources: Mapping[str, str], name: str, what: str) -> str:
    if name not in sources:
        raise ValueError(
            f'{what}: {name} has no source; add one, such as sources={{{name!r}: "measured"}}'
        )
    return _quoted(sources[name])


def _digits(number: float) -> str:
    """All digits, without trailing zeros: 4.5e+11."""
    number = float(number)
    if 1e5 <= abs(number) < math.inf:
        return f"{Decimal(repr(number)).normalize():e}"
    return repr(number)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """A TOML string: as in JSON, but with DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
