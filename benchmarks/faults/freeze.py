"""Hash of the files that make the cases, so that later changes are noticed.

``python -m benchmarks.faults.freeze`` writes the file FROZEN of this folder; the path of another
folder writes the one of that folder.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
RECORD = "FROZEN"


def frozen_files(folder: Path | None = None) -> list[Path]:
    """Return the files that make the cases of a folder, this one by default: all but this file."""
    files = (path for kind in ("py", "toml") for path in (folder or FOLDER).rglob(f"*.{kind}"))
    return sorted(path for path in files if path != Path(__file__))


def digest(files: list[Path], folder: Path | None = None) -> str:
    """Return the sha256 over the contents of the files and their names in the folder."""
    total = hashlib.sha256()
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder or FOLDER).as_posix()} {content}\n".encode())
    return total.hexdigest()


def is_frozen(folder: Path | None = None) -> bool:
    """Return True if the files are those that were frozen."""
    record = (folder or FOLDER) / RECORD
    return record.read_text("utf-8").strip() == digest(frozen_files(folder), folder)


def freeze(folder: Path) -> None:
    """Write the record of a folder."""
    (folder / RECORD).write_text(digest(frozen_files(folder), folder) + "\n", "utf-8")


if __name__ == "__main__":
    freeze(Path(sys.argv[1]).resolve() if sys.argv[1:] else FOLDER)
