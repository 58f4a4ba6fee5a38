"""Memory of this machine: what psutil says, and the limits of control groups of Linux."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")


def available(root: Path = ROOT) -> int:
    """Bytes that can still be taken, by the machine or by a control group of the process.

    psutil knows the machine alone: in a container the group has less.
    """
    return min((int(psutil.virtual_memory().available), *_of_groups(root)))


def in_use() -> int:
    """Bytes that this process holds."""
    return int(psutil.Process().memory_info().rss)


def _of_groups(root: Path) -> Iterator[int]:
    """What each group of the process, and those around it, has left."""
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, place = line.split(":", 2)
        if kinds == "":
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inner = Path(place.lstrip("/"))
        for folder in dict.fromkeys([inner, *inner.parents, Path()]):
            most, now = (_lines(base / folder / name) for name in (limit, used))
            if most and now and most[0].isdecimal():  # "max" is no limit
                # Files that were read and can be forgotten count as used.
                stat = dict(line.split() for line in _lines(base / folder / "memory.stat"))
                yield max(0, int(most[0]) - int(now[0]) + int(stat.get("inactive_file", 0)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []
