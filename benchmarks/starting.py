"""How long it takes to begin: whole processes, interleaved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.timing import seconds

ROUNDS = 7
IMPORT_LIMIT, HELP_LIMIT = 1.10, 0.3


def _seconds_of(*command: str) -> float:
    return seconds(lambda: subprocess.run(command, capture_output=True, check=True))


def measure() -> tuple[float, float]:
    """Importing the layer over ``import torch``, and the seconds of ``headwise --help``."""
    ours = (sys.executable, "-c", "from headwise import MultiheadAttention")
    torch = (sys.executable, "-c", "import torch")
    door = (str(Path(sys.executable).with_name("headwise")), "--help")
    for command in (ours, torch, door):
        _seconds_of(*command)
    ratios = [_seconds_of(*ours) / _seconds_of(*torch) for _ in range(ROUNDS)]
    return median(ratios), median(_seconds_of(*door) for _ in range(ROUNDS))
