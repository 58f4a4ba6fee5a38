"""A job of two processes that wait for a fault, as a program: `launch_command` and `CommandJob`.

    python -m tests.sharding.processes.held_job FOLDER [FAULT]

Each process makes a file in FOLDER when it waits; the first one ends its work when there is a file
"end". With the fault "error" both raise the same error, with "crash" the last one raises an error
of another kind.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from headwise.cli.output import PrintedErrors
from headwise.cli.processes import CommandJob, launch_command, rank_count
from headwise.errors import OptionError

TIMEOUT = 3.0  # a process that begins five times later is lost


def wait_for_a_fault(folder: Path, fault: str) -> None:
    with CommandJob(TIMEOUT, ends_at_once=True) as job:
        job.barrier("begun")
        if fault == "error":
            raise OptionError(saw="--heads 5", needed="6", do="--heads 6")
        if fault == "crash" and job.rank == 1:
            raise ZeroDivisionError
        folder.joinpath(f"rank-{job.rank}").touch()
        while job.rank or not folder.joinpath("end").exists():
            time.sleep(0.05)


if __name__ == "__main__":
    folder, fault = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    with PrintedErrors():
        if rank_count() > 1:
            wait_for_a_fault(folder, fault)
        command = [sys.executable, "-m", "tests.sharding.processes.held_job", *sys.argv[1:]]
        sys.exit(launch_command(command, count=2, interrupted=lambda: "Interrupted."))
