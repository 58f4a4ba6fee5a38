"""The hidden folder in which a target grows; it becomes the target by one rename.

.NAME.headwise-part/journal     what is done and safe on the disk, see `Journal`
.NAME.headwise-part/made/       the files of the target
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from headwise.checkpoints.output_plan import OutputFile, OutputPlan, reserve, write_all
from headwise.errors import CheckpointError
from headwise.support.axes import human_bytes

# The disk knows no second name for a file.
_UNLINKED = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class StagingDir:
    """Files of the size they will have, into which tensors are written in any order.

    At the end of a ``with`` nothing stays of the folder; an interruption leaves it for a later run.

    Attributes:
        path: of the folder.
        done: steps of an earlier run that need no more work.
        found: what of an earlier run there was: "nothing", "its beginning", or "other work".
        handles: the open files by their names, once the work has begun.
    """

    def __init__(self, target: Path, outline: OutputPlan) -> None:
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
        self.handles: dict[str, int] = {}
        self._has_name = False
        earlier = self._made.iterdir() if self._made.is_dir() else ()
        taken = sum(file.stat().st_blocks * 512 for file in earlier)  # by an earlier run
        require_room(target.parent, outline.room - taken)
        self._new = [self.path, *(above for above in target.parents if not above.exists())]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(self.path / "journal")
        except OSError:
            self._remove_folders()
            raise

    @property
    def made(self) -> Path:
        """The folder in which the files of the target grow."""
        return self._made

    def begin(self, identity: str) -> None:
        """Make the files, or open those of an earlier run of the same work.

        Raises:
            OSError: nothing can be written there, or there is no room.
        """
        is_whole = all(_begins(self._made / file.name, file) for file in self._outline.files)
        done = self._journal.done(identity) if is_whole else None
        if done is not None:
            self.found, self.done = "its beginning", done
            self._open(os.O_RDWR)
            return
        if self._journal.identity not in ("", identity):
            self.found = "other work"
        self._journal.forget()  # first: files of the right size say nothing of what is in them
        if self._made.exists():
            shutil.rmtree(self._made)
        self._made.mkdir()
        self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        for file in self._outline.files:
            handle = self.handles[file.name]
            reserve(handle, file.size)
            write_all(handle, memoryview(file.head), 0)
            os.fsync(handle)
        _sync(self._made)
        self._journal.append(identity)

    def _open(self, flags: int) -> None:
        for file in self._outline.files:
            self.handles[file.name] = os.open(self._made / file.name, flags, 0o666)

    def flush(self, steps: Iterable[int]) -> None:
        """See that all that was written is on the disk, and note that these steps are done."""
        for handle in self.handles.values():
            os.fsync(handle)
            if hasattr(os, "posix_fadvise"):  # nobody reads it soon: memory is left to others
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        self._journal.add(steps)

    def finish(self, *, is_folder: bool) -> None:
        """Turn what was made into the target, which must not be there yet.

        Raises:
            CheckpointError: it is there; or it is this run's, and what comes after that failed.
            OSError: it cannot be put there.
        """
        if self._outline.index is not None:
            name, content = self._outline.index
            (self._made / name).write_bytes(content)
            _sync(self._made / name)
        _sync(self._made)
        require_free(self._target)
        made = self._made if is_folder else self._made / self._outline.files[0].name
        if is_folder:
            os.rename(made, self._target)
        else:
            _name_file(made, self._target)
        self._has_name = True
        try:
            if not is_folder:
                made.unlink(missing_ok=True)  # its first name
            _sync(self._target.parent)
            self._discard()
        except OSError as error:
            where = error.filename or self._target.parent
            raise CheckpointError(
                saw=f"{where}, where the system says: {error.strerror or error}; {self._target} is "
                "there, whole",
                needed="a disk that can be written to until the end",
                do="keep the target if `headwise verify` reads it after a restart; remove "
                f"{self.path} if it is still there",
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
            if kind is not None and issubclass(kind, Exception) and not self._has_name:
                self._discard()
        finally:
            for handle in self.handles.values():
                os.close(handle)
            self.handles.clear()
            self._journal.close()

    def _discard(self) -> None:
        """Remove everything. The journal goes last: while it is there, no other run comes in."""
        if self._made.exists():
            shutil.rmtree(self._made)
        (self.path / "journal").unlink(missing_ok=True)
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Those that this run has made, if nobody else has put anything there."""
        for folder in self._new:
            with suppress(OSError):
                folder.rmdir()


def _begins(path: Path, file: OutputFile) -> bool:
    """Whether it is a file of this size and with this head."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as opened:
        return opened.read(len(file.head)) == file.head


def folder_of(target: Path) -> Path:
    """Where a target grows."""
    return target.parent / f".{target.name}.headwise-part"


def require_free(target: Path) -> None:
    """Raise CheckpointError where something has the target's name."""
    if os.path.lexists(target):
        raise _there_already(target)


def require_room(folder: Path, size: int) -> None:
    """Raise CheckpointError where the disk has less room than ``size`` bytes."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)
    room = disk.f_bavail * disk.f_frsize
    if room < size:
        there, wanted = human_bytes(room), human_bytes(size)
        if there == wanted:
            there, wanted = f"{room:,} B", f"{size:,} B"
        raise CheckpointError(
            saw=f"{folder} has room for {there}",
            needed=f"room for {wanted}",
            do="make room, or name a target on another disk",
        )


def _there_already(target: Path) -> CheckpointError:
    return CheckpointError(
        saw=f"{target}, which is there already",
        needed="a name that is free: nothing is written over",
        do="name another target, or remove this one",
    )


def _name_file(made: Path, target: Path) -> None:
    """A rename would write over a file that came there meanwhile; a second name does not."""
    try:
        os.link(made, target)
    except FileExistsError as error:
        raise _there_already(target) from error
    except OSError as error:
        if error.errno not in _UNLINKED:
            raise
        os.rename(made, target)


def _sync(path: Path) -> None:
    """See that a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Journal:
    """An open journal of what is done, for a run that goes on after one that was killed.

    No other run may open it.

    <identity>      what is made of what; another one, and the run starts anew
    0 1 2 3         steps whose bytes are on the disk, a line for each time that was made sure of
    4 5
    """

    def __init__(self, path: Path) -> None:
        """Open or begin it.

        Raises:
            CheckpointError: another run has it.
        """
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with ExitStack() as stack:
            stack.callback(os.close, handle)
            _lock(handle, path)
            with open(handle, "rb", closefd=False) as file:
                raw = file.read()
            # A line without an end was cut off. It goes: the next one would be written on to it.
            self._end = raw.rfind(b"\n") + 1
            os.ftruncate(handle, self._end)
            stack.pop_all()
        self._handle = handle
        lines = raw[: self._end].splitlines()
        self.identity = lines[0].decode("ascii", "replace") if lines else ""
        self._lines = lines[1:]

    def done(self, identity: str) -> frozenset[int] | None:
        """The steps that need no more work; None where the journal is that of another work."""
        if self.identity != identity:
            return None
        try:
            return frozenset(int(number) for line in self._lines for number in line.split())
        except ValueError:  # a disk without power may leave anything
            return None

    def forget(self) -> None:
        """Nothing is done any more, and the disk knows it: the files may change."""
        os.ftruncate(self._handle, 0)
        os.fsync(self._handle)
        self._end = 0

    def add(self, steps: Iterable[int]) -> None:
        """Steps whose bytes are on the disk."""
        self.append(" ".join(map(str, steps)))

    def close(self) -> None:
        """Let another run open it."""
        os.close(self._handle)

    def append(self, line: str) -> None:
        """A line: in an empty journal, what is made of what."""
        raw = f"{line}\n".encode("ascii")
        write_all(self._handle, memoryview(raw), self._end)
        os.fsync(self._handle)
        self._end += len(raw)


def _lock(handle: int, path: Path) -> None:
    """Take it for this run, if it is still the one that is there."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(handle), path.stat())
    except (BlockingIOError, FileNotFoundError) as error:
        raise _in_use(path) from error
    if not is_there:  # the run that had it has removed it, and another one has begun since
        raise _in_use(path)


def _in_use(path: Path) -> CheckpointError:
    return CheckpointError(
        saw=f"{path.parent}, into which another run is writing",
        needed="one run for a target",
        do="wait for it, or name another target",
    )
