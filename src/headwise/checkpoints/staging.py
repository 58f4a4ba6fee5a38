"""Hidden folder for an unfinished target, which one rename turns into the target.

.NAME.headwise-part/journal     the finished steps, see `Journal`
.NAME.headwise-part/journal-0   those of another process that writes a share of the files
.NAME.headwise-part/made/       the files of the target
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from headwise.checkpoints.journal import Journal, finished_steps, parse_journal
from headwise.checkpoints.output import OutputFile, OutputPlan, reserve_space, write_all_bytes
from headwise.errors import CheckpointError
from headwise.support.text import human_bytes

SHARE = "journal-"  # followed by the number of a process
# Errors of file systems without hard links.
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class StagingDir:
    """Folder with files of their final size, into which tensors are written in any order.

    The folder is removed at the end of a ``with``; an interruption leaves it for a later run.

    Attributes:
        path: the hidden folder.
        files_path: the folder of the target's files, within ``path``.
        done: steps that an earlier run has finished.
        earlier_run: files of an earlier run: "nothing", "its beginning", or "other work".
        handles: file name -> open file, after `begin`.
    """

    def __init__(self, target: Path, plan: OutputPlan) -> None:
        """Lock the folder against other runs.

        Raises:
            CheckpointError: too little disk space, or another run uses the folder.
            OSError: the folder cannot be written.
        """
        self._target, self._plan = target, plan
        self.path = staging_path(target)
        self.files_path = self.path / "made"
        self.done: frozenset[int] = frozenset()
        self.earlier_run = "nothing"
        self.handles: dict[str, int] = {}
        self._is_renamed = self._is_kept = False
        earlier = self.files_path.iterdir() if self.files_path.is_dir() else ()
        allocated = sum(file.stat().st_blocks * 512 for file in earlier)
        require_disk_space(target.parent, plan.peak_size - allocated)
        self._new = [self.path, *(above for above in target.parents if not above.exists())]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(self.path / "journal")
        except OSError:
            self._remove_folders()
            raise

    def begin(self, identity: str) -> None:
        """Create the files, or open those of an earlier run with the same identity.

        Raises:
            OSError: the files cannot be written, or the disk is full.
        """
        is_usable = all(
            _has_planned_size_and_header(self.files_path / file.name, file)
            for file in self._plan.files
        )
        done = self._journal.finished_steps(identity) if is_usable else None
        if done is not None:
            self.earlier_run = "its beginning"
            self.done = done | read_finished_steps(self.path, identity)
            self._open_files(os.O_RDWR)
            return
        if self._journal.identity not in ("", identity):
            self.earlier_run = "other work"
        for journal in _list_share_journals(self.path):
            journal.unlink()
        _sync_to_disk(self.path)
        self._journal.clear()  # first: new files have the right size before they have any tensor
        if self.files_path.exists():
            shutil.rmtree(self.files_path)
        self.files_path.mkdir()
        self._open_files(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        for file in self._plan.files:
            handle = self.handles[file.name]
            reserve_space(handle, file.size)
            write_all_bytes(handle, memoryview(file.head), 0)
            os.fsync(handle)
        _sync_to_disk(self.files_path)
        self._journal.append(identity)

    def _open_files(self, flags: int) -> None:
        for file in self._plan.files:
            self.handles[file.name] = os.open(self.files_path / file.name, flags, 0o666)

    def flush_and_record_steps(self, steps: Iterable[int]) -> None:
        """Force all writes to the disk, then record the steps as finished."""
        _sync_open_files(self.handles.values())
        self._journal.record_steps(steps)

    def keep(self) -> None:
        """Leave the folder for a later run, also if the block raises."""
        self._is_kept = True

    def finish(self, *, is_folder: bool) -> None:
        """Rename the files to the target, which must not exist yet.

        Raises:
            CheckpointError: the target exists; or the cleanup after the rename failed.
            OSError: the rename failed.
        """
        if self._plan.index is not None:
            name, content = self._plan.index
            (self.files_path / name).write_bytes(content)
            _sync_to_disk(self.files_path / name)
        _sync_to_disk(self.files_path)
        require_unused_name(self._target)
        made = self.files_path if is_folder else self.files_path / self._plan.files[0].name
        if is_folder:
            os.rename(made, self._target)
        else:
            _link_file(made, self._target)
        self._is_renamed = True
        try:
            if not is_folder:
                made.unlink(missing_ok=True)  # the target is a second link to the file
            _sync_to_disk(self._target.parent)
            self._discard_files()
        except OSError as error:
            path = error.filename or self._target.parent
            raise CheckpointError(
                saw=f"{path}: {error.strerror or error}; {self._target} is complete",
                needed="a disk that stays writable until the end",
                do="keep the target if `headwise verify` reads it after a restart; remove "
                f"{self.path} if it still exists",
            ) from error

    def __enter__(self) -> StagingDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            is_final = self._is_renamed or self._is_kept
            if kind is not None and issubclass(kind, Exception) and not is_final:
                self._discard_files()
        finally:
            for handle in self.handles.values():
                os.close(handle)
            self.handles.clear()
            self._journal.close()

    def _discard_files(self) -> None:
        """Remove everything; the journal last, because it locks the folder against other runs."""
        if self.files_path.exists():
            shutil.rmtree(self.files_path)
        for journal in _list_share_journals(self.path):
            journal.unlink(missing_ok=True)
        (self.path / "journal").unlink(missing_ok=True)
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove the folders that this run has created, if they are empty."""
        for folder in self._new:
            with suppress(OSError):
                folder.rmdir()


class StagingShare:
    """Some files of the `StagingDir` of another process, with a journal of their own.

    Attributes:
        done: steps that earlier runs have finished.
        handles: file name -> open file.
    """

    def __init__(
        self,
        target: Path,
        files: Iterable[str],
        *,
        identity: str,
        number: int,
        done: frozenset[int],
    ) -> None:
        """Open files that `StagingDir.begin` has created.

        Args:
            target: the path of the target.
            files: the names of the files.
            identity: the identity of the run.
            number: the number of this process.
            done: what `read_finished_steps` returned before any process wrote.

        Raises:
            CheckpointError: another run uses the journal.
            OSError: the files cannot be written.
        """
        path = staging_path(target)
        self.done = done
        self._journal = Journal(path / f"{SHARE}{number}")
        if self._journal.finished_steps(identity) is None:
            self._journal.clear()
            self._journal.append(identity)
        self.handles = {name: os.open(path / "made" / name, os.O_RDWR) for name in files}

    def flush_and_record_steps(self, steps: Iterable[int]) -> None:
        """Force all writes to the disk, then record the steps as finished."""
        _sync_open_files(self.handles.values())
        self._journal.record_steps(steps)

    def __enter__(self) -> StagingShare:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles.values():
            os.close(handle)
        self._journal.close()


def read_finished_steps(path: Path, identity: str) -> frozenset[int]:
    """Return the steps that journals in a staging folder record for runs of this identity."""
    journals = [path / "journal", *_list_share_journals(path)]
    finished = (finished_steps(*parse_journal(x.read_bytes()), identity) for x in journals)
    return frozenset().union(*(steps for steps in finished if steps is not None))


def _list_share_journals(path: Path) -> list[Path]:
    return sorted(path.glob(f"{SHARE}[0-9]*"))


def _sync_open_files(handles: Iterable[int]) -> None:
    """Force all writes to the disk."""
    for handle in handles:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):  # frees page cache
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _has_planned_size_and_header(path: Path, file: OutputFile) -> bool:
    """True if a file has the planned size and header."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as opened:
        return opened.read(len(file.head)) == file.head


def staging_path(target: Path) -> Path:
    """Return the hidden folder for an unfinished target."""
    return target.parent / f".{target.name}.headwise-part"


def require_unused_name(target: Path) -> None:
    """Raise CheckpointError if the target exists."""
    if os.path.lexists(target):
        raise _exists_error(target)


def require_disk_space(folder: Path, size: int) -> None:
    """Raise CheckpointError if the disk has less than ``size`` bytes free."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < size:
        free_text, needed = human_bytes(free), human_bytes(size)
        if free_text == needed:
            free_text, needed = f"{free:,} B", f"{size:,} B"
        raise CheckpointError(
            saw=f"{folder} has {free_text} free",
            needed=f"{needed} free",
            do="free disk space, or name a target on another disk",
        )


def _exists_error(target: Path) -> CheckpointError:
    return CheckpointError(
        saw=f"{target} exists already",
        needed="a new name: no file is overwritten",
        do="name another target, or remove this one",
    )


def _link_file(made: Path, target: Path) -> None:
    """Link a file to its target: unlike a rename, a link never overwrites a new file."""
    try:
        os.link(made, target)
    except FileExistsError as error:
        raise _exists_error(target) from error
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.rename(made, target)


def _sync_to_disk(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
