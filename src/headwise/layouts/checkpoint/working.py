"""The hidden folder in which a target grows; it becomes the target by one rename.

.NAME.headwise-part/journal     `headwise.layouts.checkpoint.journal`
.NAME.headwise-part/made/       the files of the target
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from headwise.errors import CheckpointError
from headwise.layouts.checkpoint import moving_bytes
from headwise.layouts.checkpoint.journal import Journal
from headwise.layouts.checkpoint.target import Outline


class Working:
    """Files of the size they will have, into which tensors are written in any order.

    Attributes:
        path: of the folder.
        done: steps of an earlier run that need no more work.
        found: what of an earlier run there was: "nothing", "its beginning", or "other work".
    """

    def __init__(self, target: Path, outline: Outline) -> None:
        """Take the folder, so that no other run does.

        Raises:
            CheckpointError: no room, or another run writes there.
            OSError: nothing can be written there.
        """
        self._target, self._outline = target, outline
        self.path = folder_of(target)
        self.done: frozenset[int] = frozenset()
        self.found = "nothing"
        self._made = self.path / "made"
        self._handles: dict[str, int] = {}
        require_room(target.parent, outline.size - _taken(self._made))
        self.path.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(self.path / "journal")

    def begin(self, identity: str) -> None:
        """Make the files, or open those of an earlier run of the same work.

        Raises:
            OSError: nothing can be written there, or there is no room.
        """
        done = self._journal.done(identity) if self._is_whole() else None
        if done is not None:
            self.found, self.done = "its beginning", done
            self._open(os.O_RDWR)
            return
        if self._journal.identity not in ("", identity):
            self.found = "other work"
        self._make(identity)

    def handle(self, name: str) -> int:
        """The open file of this name."""
        return self._handles[name]

    def flush(self, steps: Iterable[int]) -> None:
        """See that all that was written is on the disk, and note that these steps are done."""
        for handle in self._handles.values():
            os.fsync(handle)
            _forget(handle)
        self._journal.add(steps)

    def finish(self, *, is_folder: bool) -> None:
        """Turn what was made into the target, which must not be there yet."""
        if self._outline.index is not None:
            name, content = self._outline.index
            (self._made / name).write_bytes(content)
            _sync(self._made / name)
        _sync(self._made)
        require_free(self._target)
        made = self._made if is_folder else self._made / self._outline.files[0].name
        os.rename(made, self._target)
        _sync(self._target.parent)
        self.discard()

    def close(self) -> None:
        """Leave everything for a later run."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        self._journal.close()

    def discard(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path)

    def _is_whole(self) -> bool:
        return all(
            (self._made / file.name).is_file()
            and (self._made / file.name).stat().st_size == file.size
            for file in self._outline.files
        )

    def _make(self, identity: str) -> None:
        if self._made.exists():
            shutil.rmtree(self._made)
        self._made.mkdir()
        self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        for file in self._outline.files:
            handle = self._handles[file.name]
            moving_bytes.reserve(handle, file.size)
            moving_bytes.write_all(handle, memoryview(file.head), 0)
            os.fsync(handle)
        _sync(self._made)
        self._journal.begin(identity)

    def _open(self, flags: int) -> None:
        for file in self._outline.files:
            self._handles[file.name] = os.open(self._made / file.name, flags, 0o666)


def folder_of(target: Path) -> Path:
    """Where a target grows."""
    return target.parent / f".{target.name}.headwise-part"


def require_free(target: Path) -> None:
    """Raise CheckpointError where something has the target's name."""
    if os.path.lexists(target):
        raise CheckpointError(
            saw=f"{target}, which is there already",
            needed="a name that is free: nothing is written over",
            do="name another target, or remove this one",
        )


def require_room(folder: Path, size: int) -> None:
    """Raise CheckpointError where the disk has less room than ``size`` bytes."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)
    room = disk.f_bavail * disk.f_frsize
    if room < size:
        raise CheckpointError(
            saw=f"{room / 1e9:.2f} GB of room in {folder}",
            needed=f"{size / 1e9:.2f} GB",
            do="make room, or name a target on another disk",
        )


def _taken(folder: Path) -> int:
    """The bytes on the disk that an earlier run has taken."""
    if not folder.is_dir():
        return 0
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


def _forget(handle: int) -> None:
    """Nobody reads it soon: memory is left to those who need it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync(path: Path) -> None:
    """See that a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
