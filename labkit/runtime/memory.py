"""Memory that new processes may take."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CGROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """What the machine has free, and no more than the cgroups of this process may still take."""
    return min([psutil.virtual_memory().available, *left_by_cgroups()])


def left_by_cgroups() -> Iterator[int]:
    """What each memory limit of this process's cgroup (v1 or v2) and its ancestors leaves, in
    bytes. Caches of files count as left."""
    for line in CGROUPS.read_text().splitlines() if CGROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)  # v2 names no controllers
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        total = "total_" if controllers else ""
        group = MOUNT / controllers / path.strip("/")
        for folder in [group, *group.parents]:
            with suppress(OSError, ValueError, KeyError):  # no limit, or a path outside a container
                limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
                stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                cached = [int(stat[f"{total}{kind}_file"]) for kind in ("active", "inactive")]
                yield limit - used + sum(cached)
