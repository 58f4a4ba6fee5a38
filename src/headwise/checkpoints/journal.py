"""What is done and safe on the disk, for a run that goes on after one that was killed.

<identity>      what is made of what; another one, and the run starts anew
0 1 2 3         steps whose bytes are on the disk, a line for each time that was made sure of
4 5
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from headwise.checkpoints.moving_bytes import write_all
from headwise.errors import CheckpointError


class Journal:
    """An open journal, which no other run may open."""

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

    def begin(self, identity: str) -> None:
        """Write what is made of what, into a journal that is empty."""
        self._append(identity)

    def add(self, steps: Iterable[int]) -> None:
        """Steps whose bytes are on the disk."""
        self._append(" ".join(map(str, steps)))

    def close(self) -> None:
        """Let another run open it."""
        os.close(self._handle)

    def _append(self, line: str) -> None:
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
