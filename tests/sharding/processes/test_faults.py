"""Faults of a job in real processes: a sentence, a status, and no process that is left."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from headwise.cli.output import CRASHED, INTERRUPTED, LOST, USAGE
from tests.sharding.processes.running_command import RunningCommand, is_running, wait_until

pytestmark = pytest.mark.slow


def job(folder: Path, *fault: str) -> RunningCommand:
    program = "tests.sharding.processes.held_job"
    return RunningCommand(folder, sys.executable, "-m", program, folder, *fault)


def begun(folder: Path) -> RunningCommand:
    """A job whose processes both wait."""
    return job(folder).when(lambda: len(list(folder.glob("rank-*"))) == 2)


def test_a_killed_process_is_named(tmp_path: Path) -> None:
    command = begun(tmp_path)
    killed = command.workers[1]
    killed.send_signal(signal.SIGKILL)
    assert command.end() == LOST
    assert command.printed.splitlines() == [
        f"headwise: rank 1 of 2 (process {killed.pid}) was ended by SIGKILL",
        "  needed: every process until the work is done",
        "  do:     run the same command again: it resumes from what is done; with fewer processes "
        "if memory ran out",
    ]


def test_a_stopped_process_is_named_within_the_timeout(tmp_path: Path) -> None:
    """The other one has done its work, and stays. torch's launcher waits for 30 s before it kills
    the stopped process, which the test does at once."""
    command = begun(tmp_path)
    other, stopped = command.workers
    stopped.send_signal(signal.SIGSTOP)
    tmp_path.joinpath("end").touch()
    wait_until(lambda: not is_running(other))
    assert stopped.status() == "stopped"
    stopped.send_signal(signal.SIGKILL)
    assert command.end() == LOST
    assert command.printed.splitlines() == [
        "headwise: rank 1 of 2 has given no sign of life for 3 s",
        "  needed: every rank until the work is done",
        "  do:     start the same run again; if a process was only slow, with a longer timeout",
    ]


def test_no_process_outlives_its_launcher(tmp_path: Path) -> None:
    command = begun(tmp_path)
    command.process.send_signal(signal.SIGKILL)
    assert command.end() == -signal.SIGKILL
    assert command.printed.splitlines() == [
        "headwise: the launcher of these processes ended",
        "  needed: the launcher until the work is done",
        "  do:     run the same command again: it resumes from what is done",
    ]


def test_an_interruption_is_a_line_and_a_status(tmp_path: Path) -> None:
    command = begun(tmp_path)
    command.process.send_signal(signal.SIGINT)
    assert command.end() == INTERRUPTED
    assert command.printed == "Interrupted."


def test_an_error_of_every_process_is_printed_once(tmp_path: Path) -> None:
    command = job(tmp_path, "error")
    assert command.end() == USAGE
    assert command.printed == "headwise: --heads 5\n  needed: 6\n  do:     --heads 6"


def test_a_crash_has_its_traceback(tmp_path: Path) -> None:
    command = job(tmp_path, "crash")
    assert command.end() == CRASHED
    *_, error, line = command.printed.splitlines()
    assert (error, line) == ("ZeroDivisionError", "headwise: rank 1 stopped at a bug in headwise")
