"""Memory of this machine, from psutil and the limits of control groups."""

from pathlib import Path

import psutil


def available_memory(root: Path = Path("/")) -> int:
    """Return the free bytes of the machine, or of a control group if that has fewer."""
    free = [int(psutil.virtual_memory().available)]
    for line in _read_lines_if_readable(root / "proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        inner = Path(path.lstrip("/"))
        # Kinds are named by the first version of control groups, which is not read.
        for folder in () if kinds else dict.fromkeys([inner, *inner.parents, Path()]):
            group = root / "sys/fs/cgroup" / folder
            names = ("memory.max", "memory.current", "memory.stat")
            most, now, stat = (_read_lines_if_readable(group / name) for name in names)
            if most and now and most[0].isdecimal():  # "max" is no limit
                # The kernel counts cached files as used, although it can drop them.
                cached = int(dict(line.split() for line in stat).get("inactive_file", 0))
                free.append(max(0, int(most[0]) - int(now[0]) + cached))
    return min(free)


def process_memory() -> int:
    """Return the bytes that this process holds."""
    return int(psutil.Process().memory_info().rss)


def _read_lines_if_readable(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []
