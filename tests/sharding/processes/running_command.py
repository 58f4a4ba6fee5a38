"""A command of headwise in several processes, as a test starts, kills and waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

LONGEST = 240.0  # seconds that anything may take on a busy machine
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


class RunningCommand:
    """A command, with the processes that its launcher has started.

    Args:
        folder: the working directory, to which ``stdout`` and ``stderr`` are written.
        command: the program and its arguments.
    """

    def __init__(self, folder: Path, *command: object) -> None:
        self._folder = folder
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                cwd=folder,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.workers: list[psutil.Process] = []

    @classmethod
    def headwise(cls, folder: Path, *arguments: object) -> RunningCommand:
        """``headwise ARGUMENTS``."""
        return cls(folder, sys.executable, "-m", "headwise", *arguments)

    def when(self, is_so: Callable[[], bool]) -> RunningCommand:
        """Wait until something is so; then the workers are known."""
        wait_until(lambda: is_so() or self.process.poll() is not None)
        assert self.process.poll() is None, self.printed
        self.workers = sorted(psutil.Process(self.process.pid).children(), key=lambda p: p.pid)
        return self

    def end(self) -> int:
        """The exit status, once no process of the command is left."""
        status = self.process.wait(LONGEST)
        wait_until(lambda: not any(map(is_running, self.workers)))
        return status

    @property
    def printed(self) -> str:
        """Standard error, without lines of the progress bar and of the estimate."""
        lines = (self._folder / "stderr").read_text("utf-8").splitlines()
        return "\n".join(line for line in lines if line and "by estimate" not in line)


def is_running(process: psutil.Process) -> bool:
    """True while a thread of the process runs, and may hold locks: also if the first has ended."""
    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        return process.is_running() and not is_zombie
    except psutil.NoSuchProcess:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST
    while not is_so():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.02)
