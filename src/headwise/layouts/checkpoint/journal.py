"""What is done and safe on the disk, for a run that goes on after one that was killed.

<identity>      what is made of what; another one, and the run starts anew
0 1 2 3         steps whose bytes are on the disk, a line for each time that was made sure of
4 5
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from headwise.errors import CheckpointError


class Journal:
    """An open journal, which no other run may open."""

    def __init__(self, path: Path) -> None:
        """Open or begin it.

        Raises:
            CheckpointError: another run has it.
        """
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._handle)
            raise CheckpointError(
                saw=f"{path.parent}, into which another run is writing",
                needed="one run for a target",
                do="wait for it, or name another target",
            ) from error
        with open(self._handle, "rb", closefd=False) as file:
            lines = file.read().split(b"\n")[:-1]  # what has no end was cut off
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

    def begin(self, identity: str) -> None:
        """Forget all, and begin with this."""
        os.ftruncate(self._handle, 0)
        self._append(identity)

    def add(self, steps: Iterable[int]) -> None:
        """Steps whose bytes are on the disk."""
        self._append(" ".join(map(str, steps)))

    def close(self) -> None:
        """Let another run open it."""
        os.close(self._handle)

    def _append(self, line: str) -> None:
        os.write(self._handle, f"{line}\n".encode("ascii"))
        os.fsync(self._handle)
