"""Clusters into a TOML file, in the form of known.toml, which `read_clusters` reads back equal."""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import inf
from pathlib import Path

from labkit.clusters.cluster import Cluster, Device, Level
from labkit.clusters.reading import clusters_in

DEVICE_NUMBERS = ("memory_bytes", "memory_bytes_per_s", "launch_s")
DEVICE_PARTS = {  # what need not be there
    "matmul_reached": 1.0, "memory_reached": 1.0, "tile": 0.0, "host_s": 0.0,
}  # fmt: skip
LEVEL_NUMBERS = ("bytes_per_s", "latency_s")
LEVEL_PARTS = {"reached": 1.0, "start_s": 0.0}


def write_clusters(path: str | Path, clusters: Mapping[str, Cluster]) -> None:
    """Write clusters, each under its own name, to a file; what was in it is gone.

    Raises ValueError, and writes nothing, for what could not be read back: a number without a
    source, or one that no cluster can have.

    >>> write_clusters("mine.toml", {"selene": cluster("selene")})
    """
    for name, one in clusters.items():
        if name != one.name:
            raise ValueError(
                f"the cluster under {name!r} is called {one.name!r}; make both the same: "
                f"dataclasses.replace(one, name={name!r})"
            )
    if not clusters:
        raise ValueError(f"{path}: no cluster to write; give at least one, under its name")
    text = _text(clusters)
    if clusters_in(text, str(path)) != dict(clusters):
        raise ValueError(
            f"{path}: these clusters would not read back equal; numbers, and sources of these "
            "numbers only, are needed"
        )
    Path(path).write_bytes(text.encode())


def _text(clusters: Mapping[str, Cluster]) -> str:
    keys: dict[str, Device] = {}
    for one in clusters.values():
        if one.device not in keys.values():
            keys[_free_key(one.device.name, keys)] = one.device
    blocks = [_device(key, device) for key, device in keys.items()]
    for one in clusters.values():
        key = next(key for key, device in keys.items() if device == one.device)
        blocks.append(_cluster(one, key))
    return "\n".join("".join(f"{line}\n" for line in block) for block in blocks)


def _free_key(name: str, taken: Mapping[str, Device]) -> str:
    """What a device is called in the file: its name in small letters, numbered if need be."""
    key = stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"
    number = 1
    while key in taken:
        number += 1
        key = f"{stem}-{number}"
    return key


def _device(key: str, device: Device) -> Iterator[str]:
    yield f"[devices.{key}]"
    yield f"name = {_quoted(device.name)}"
    yield from _numbers(device, device.name, DEVICE_NUMBERS, DEVICE_PARTS)
    for dtype, rate in device.peak_flops.items():
        source = _source(device.sources, f"peak_flops.{dtype}", device.name)
        yield f"peak_flops.{_key(dtype)} = [{_number(rate)}, {source}]"


def _cluster(one: Cluster, device: str) -> Iterator[str]:
    table = f"clusters.{_key(one.name)}"
    yield f"[{table}]"
    yield f"title = {_quoted(one.title)}"
    yield f"device = {_quoted(device)}"
    yield f"nodes = {one.nodes}"
    for place, level in enumerate(filter(None, (one.inside, one.between))):
        yield f"[[{table}.levels]]"
        yield f"name = {_quoted(level.name)}"
        if place == 0:
            yield f"devices = {one.devices_per_node}"
        yield f"ports = {level.ports}"
        yield from _numbers(level, f"{one.name}, {level.name}", LEVEL_NUMBERS, LEVEL_PARTS)


def _numbers(
    thing: Device | Level, what: str, needed: tuple[str, ...], parts: Mapping[str, float]
) -> Iterator[str]:
    for name in (*needed, *parts):
        number = getattr(thing, name)
        if name in thing.sources or name in needed or number != parts[name]:
            yield f"{name} = [{_number(number)}, {_source(thing.sources, name, what)}]"


def _source(sources: Mapping[str, str], name: str, what: str) -> str:
    if name not in sources:
        raise ValueError(
            f'{what}: {name} has no source; say who says so, as sources={{{name!r}: "measured"}}'
        )
    return _quoted(sources[name])


def _number(number: float) -> str:
    """With all its digits, and no row of zeros: 4.5e+11."""
    number = float(number)
    if 1e5 <= abs(number) < inf:
        return f"{Decimal(repr(number)).normalize():e}"
    return repr(number)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """A string of TOML: as JSON has it, but for one control character that JSON lets stand."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
