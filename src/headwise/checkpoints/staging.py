"""Hidden folder for an unfinished target: its finished files, and a manifest of them.

    .NAME.headwise-part/manifest      JSON lines: the identity of the run, then the finished files
    .NAME.headwise-part/files/        the finished files
    .NAME.headwise-part/FILE.part     a file that is being written

A file gets its line in the manifest after its rename into ``files``, so that a later run resumes at
the first file without a valid line. One rename turns ``files`` into the target.
"""

import errno
import fcntl
import json
import os
import shutil
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from headwise.checkpoints.source import changed_error
from headwise.errors import CheckpointError
from headwise.support.files import parse_json_object
from headwise.support.text import human_bytes

MANIFEST, FILES = "manifest", "files"
CHUNK = 2**18  # bytes that are read at a time: they fit into the cache of a core
# The kernel or the disk has no copy operation here; reading and writing may still work.
_NO_COPY_RANGE = {errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM}
# Errors of file systems without hard links.
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class PartialFile:
    """File NAME.part that one thread writes from start to end, and another one checksums."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._file = path.open("w+b", buffering=0)
        self._checksum = self._read = 0

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes: one system call may write fewer than requested."""
        content = memoryview(content)
        while content:
            written = os.write(self._file.fileno(), content)
            content, self.size = content[written:], self.size + written

    def append_range(self, path: Path, start: int, count: int) -> None:
        """Append bytes of another file, inside the kernel where possible.

        Raises:
            CheckpointError: the other file ends too early.
        """
        with path.open("rb") as source:
            while count:
                moved = _copy_some(source.fileno(), start, self._file.fileno(), count)
                if not moved:
                    raise changed_error(path, "became shorter")
                start, count, self.size = start + moved, count - moved, self.size + moved

    def checksum(self, end: int) -> int:
        """Return the CRC-32 of the bytes before ``end``, and start moving them to the disk."""
        handle, buffer = self._file.fileno(), memoryview(bytearray(CHUNK))
        while self._read < end:
            count = os.preadv(handle, [buffer[: end - self._read]], self._read)
            self._checksum = zlib.crc32(buffer[:count], self._checksum)
            self._read += count
        if hasattr(os, "posix_fadvise"):  # also frees page cache
            os.posix_fadvise(handle, 0, end, os.POSIX_FADV_DONTNEED)
        return self._checksum

    def finish(self) -> int:
        """Force all bytes to the disk, close the file, and return its CRC-32."""
        checksum = self.checksum(self.size)
        os.fsync(self._file.fileno())
        self.close()
        return checksum

    def close(self) -> None:
        self._file.close()


class StagingDir:
    """Hidden folder of one run, which locks it.

    The folder is removed at the end of a ``with``; an interruption leaves it for a later run.
    """

    def __init__(self, target: Path, peak_size: int) -> None:
        """Lock the folder against other runs.

        Raises:
            CheckpointError: too little disk space, or another run uses the folder.
            OSError: the folder cannot be written.
        """
        self._target, self.path = target, staging_path(target)
        self.files_path = self.path / FILES  # of the finished files
        self.earlier_run = "nothing"  # or "its beginning", or "other work", which is removed
        self._lines: dict[str, dict[str, Any]] = {}
        self._is_renamed = False
        allocated = sum(file.stat().st_blocks * 512 for file in self.path.rglob("*"))
        require_disk_space(target.parent, peak_size - allocated)
        self._new = [self.path, *(above for above in target.parents if not above.exists())]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._manifest = _open_and_lock(self.path / MANIFEST)
        except OSError:
            self._remove_folders()
            raise

    def begin(self, identity: str) -> None:
        """Keep the finished files of an earlier run with this identity; remove those of another."""
        raw, first = self._manifest.read(), {"identity": identity}
        lines, length = _parse_manifest(raw)
        if lines[:1] == [first]:
            self.earlier_run = "its beginning"
            self._lines = {line["file"]: line for line in lines[1:]}
            self._manifest.truncate(length)
            self._manifest.seek(length)
            return
        if raw or any(entry.name != MANIFEST for entry in self.path.iterdir()):
            self.earlier_run = "other work"
        self._manifest.truncate(0)
        self._manifest.seek(0)
        self._remove_files()
        self.files_path.mkdir()
        self._append(first)

    def is_finished(self, name: str, *, verify: bool) -> bool:
        """True if a file has the size and the time of its line; with ``verify`` also its CRC-32."""
        line, path = self._lines.get(name), self.files_path / name
        if line is None or not path.is_file():
            return False
        is_as_described = {**_describe_file(path), "crc32": line.get("crc32")} == line
        return is_as_described and (not verify or _read_checksum(path) == line["crc32"])

    def finish_file(self, part: PartialFile, *, verify: bool) -> None:
        """Rename a file whose bytes are all on the disk, then write its line.

        Raises:
            CheckpointError: with ``verify``, the file reads back other bytes.
        """
        checksum, path = part.finish(), self.files_path / part.path.stem
        os.rename(part.path, path)
        _sync_to_disk(self.files_path)
        self._lines[path.name] = {**_describe_file(path), "crc32": checksum}
        self._append(self._lines[path.name])
        if verify and _read_checksum(path) != checksum:
            raise CheckpointError(
                saw=f"{path.name} reads back other bytes than were written",
                needed="a disk that returns what was written to it",
                do="check the disk, or name a target on another one",
            )

    def finish(self, made: Path) -> None:
        """Rename a file or a folder to the target, which must not exist yet.

        Raises:
            CheckpointError: the target exists; or the cleanup after the rename failed.
            OSError: the rename failed.
        """
        _sync_to_disk(made)
        require_unused_name(self._target)
        if made.is_dir():
            os.rename(made, self._target)
        else:
            _link_file(made, self._target)
        self._is_renamed = True
        try:
            _sync_to_disk(self._target.parent)
            self._discard()
        except OSError as error:
            path = error.filename or self._target.parent
            raise CheckpointError(
                saw=f"{path}: {error.strerror or error}; {self._target} is complete",
                needed="a disk that stays writable until the end",
                do="keep the target if `headwise verify` reads it after a restart; remove "
                f"{self.path} if it still exists",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._manifest:
            if kind is not None and issubclass(kind, Exception) and not self._is_renamed:
                self._discard()

    def _append(self, line: dict[str, Any]) -> None:
        self._manifest.write(json.dumps(line).encode("ascii") + b"\n")
        self._manifest.flush()
        os.fsync(self._manifest.fileno())

    def _remove_files(self) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != MANIFEST:
                entry.unlink()

    def _discard(self) -> None:
        """Remove everything; the manifest last, because it locks the folder against other runs."""
        self._remove_files()
        (self.path / MANIFEST).unlink()
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in self._new:
            with suppress(OSError):
                folder.rmdir()


def staging_path(target: Path) -> Path:
    return target.parent / f".{target.name}.headwise-part"


def require_unused_name(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointError(
            saw=f"{target} exists already",
            needed="a new name: no file is overwritten",
            do="name another target, or remove this one",
        )


def require_disk_space(folder: Path, size: int) -> None:
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


def write_synced(path: Path, content: str | bytes) -> None:
    with path.open("wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def _sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_some(source: int, start: int, target: int, count: int) -> int:
    try:
        if hasattr(os, "copy_file_range"):
            return os.copy_file_range(source, target, count, start)
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
    return os.write(target, os.pread(source, min(count, CHUNK), start))


def _read_checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _parse_manifest(raw: bytes) -> tuple[list[dict[str, Any]], int]:
    lines: list[dict[str, Any]] = []
    length = 0
    for text in raw.splitlines(keepends=True):
        with suppress(ValueError):
            line = parse_json_object(text)
            if text.endswith(b"\n") and isinstance(line.get("file" if lines else "identity"), str):
                lines.append(line)
                length += len(text)
                continue
        break
    return lines, length


def _describe_file(path: Path) -> dict[str, Any]:
    state = path.stat()
    return {"file": path.name, "size": state.st_size, "time": state.st_mtime_ns}


def _open_and_lock(path: Path) -> BinaryIO:
    """Open or create the manifest, and lock it if its path still leads to it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    with ExitStack() as stack:
        stack.callback(file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError  # its run removed it, and another run made a new one
        except (BlockingIOError, FileNotFoundError) as error:
            raise CheckpointError(
                saw=f"another run is writing into {path.parent}",
                needed="one run for each target",
                do="wait for the other run, or name another target",
            ) from error
        stack.pop_all()
    return file


def _link_file(made: Path, target: Path) -> None:
    """Link a file to its target: unlike a rename, a link never overwrites a new file."""
    try:
        os.link(made, target)
    except FileExistsError:
        require_unused_name(target)
        raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.rename(made, target)
