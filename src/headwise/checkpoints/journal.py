"""Journal of the finished steps of a conversion, from which a later run resumes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from headwise.checkpoints.output import write_all_bytes
from headwise.errors import CheckpointError


class Journal:
    """Locked file of the finished steps, from which a later run resumes.

    <identity>      hash of source and options; a run with another hash starts anew
    0 1 2 3         steps whose bytes are on the disk, one line for each flush
    4 5
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal.

        Raises:
            CheckpointError: another run holds the lock.
        """
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with ExitStack() as stack:
            stack.callback(os.close, handle)
            _lock_journal(handle, path)
            with open(handle, "rb", closefd=False) as file:
                raw = file.read()
            # Drop a last line that was cut off; the next line would continue it.
            self._end = raw.rfind(b"\n") + 1
            os.ftruncate(handle, self._end)
            stack.pop_all()
        self._handle = handle
        self.identity, self._lines = parse_journal(raw)

    def finished_steps(self, identity: str) -> frozenset[int] | None:
        """Return the finished steps; None for a journal with another identity."""
        return finished_steps(self.identity, self._lines, identity)

    def clear(self) -> None:
        """Empty the journal on the disk, before the files change."""
        os.ftruncate(self._handle, 0)
        os.fsync(self._handle)
        self._end = 0

    def record_steps(self, steps: Iterable[int]) -> None:
        """Record finished steps on the disk."""
        self.append(" ".join(map(str, steps)))

    def close(self) -> None:
        """Close the journal, which releases its lock."""
        os.close(self._handle)

    def append(self, line: str) -> None:
        """Write a line to the disk; the first line is the identity."""
        raw = f"{line}\n".encode("ascii")
        write_all_bytes(self._handle, memoryview(raw), self._end)
        os.fsync(self._handle)
        self._end += len(raw)


def parse_journal(raw: bytes) -> tuple[str, list[bytes]]:
    """Return the identity and the other lines, but for a last line that was cut off."""
    lines = raw[: raw.rfind(b"\n") + 1].splitlines()
    return (lines[0].decode("ascii", "replace") if lines else ""), lines[1:]


def finished_steps(saved: str, lines: list[bytes], identity: str) -> frozenset[int] | None:
    """Return the steps of a journal; None for a journal with another identity than ``saved``."""
    if saved != identity:
        return None
    try:
        return frozenset(int(number) for line in lines for number in line.split())
    except ValueError:  # a power failure can leave any bytes
        return None


def _lock_journal(handle: int, path: Path) -> None:
    """Lock the journal, if its path still leads to it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_current = os.path.samestat(os.fstat(handle), path.stat())
    except (BlockingIOError, FileNotFoundError) as error:
        raise _target_in_use_error(path) from error
    if not is_current:  # its run has removed the journal, and another run has created a new one
        raise _target_in_use_error(path)


def _target_in_use_error(path: Path) -> CheckpointError:
    return CheckpointError(
        saw=f"another run is writing into {path.parent}",
        needed="one run for each target",
        do="wait for the other run, or name another target",
    )
