"""Hash of the files that make the cases, so that later changes are noticed.

``python -m benchmarks.faults.freeze`` writes the file FROZEN.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent
RECORD = FOLDER / "FROZEN"


def frozen_files() -> list[Path]:
    """Return the files that make the cases: all but this one."""
    return sorted(path for path in FOLDER.rglob("*.py") if path != Path(__file__))


def digest(files: list[Path]) -> str:
    """Return the sha256 over the names and contents of the files."""
    total = hashlib.sha256()
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(FOLDER).as_posix()} {content}\n".encode())
    return total.hexdigest()


def is_frozen() -> bool:
    """Return True if the files are those that were frozen."""
    return RECORD.read_text("utf-8").strip() == digest(frozen_files())


if __name__ == "__main__":
    RECORD.write_text(digest(frozen_files()) + "\n", "utf-8")
