"""Commands that run in several processes: the launcher's side, and the side of each rank."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.output import CRASHED, LOST, exit_status_of_error, option_text, print_error
from headwise.errors import HeadwiseError, LostProcessError, OptionError, join_error_lines

if TYPE_CHECKING:
    from headwise.sharding.processes.job import Failure, Job

TIMEOUT = 60.0  # seconds
TIDY_UP = 10.0  # seconds for other ranks to tidy up after an error
NO_LAUNCHER = join_error_lines(
    "the launcher of these processes ended",
    "the launcher until the work is done",
    "run the same command again: it resumes from what is done",
)
Processes = Annotated[
    int | None,
    typer.Option(help="Processes on this machine that share the work.", show_default="one", min=1),
]
Timeout = Annotated[
    float,
    typer.Option(
        help="With --processes: seconds after which a process without a sign of life is lost.",
        min=1.0,
    ),
]


def rank_count() -> int:
    """Return the number of processes that torchrun, or ``--processes``, started; else 1."""
    return int(os.environ.get("WORLD_SIZE", "1")) if _is_launched() else 1


def local_rank_count() -> int:
    """Return the number of these processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _is_launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def require_one_launcher(processes: int | None) -> None:
    """Raise OptionError for ``--processes`` in a process that torchrun started."""
    if processes is not None and _is_launched():
        raise OptionError(
            saw=f"--processes {processes} in a command that torchrun started",
            needed="one of the two",
            do="leave --processes out: torchrun has it as --nproc-per-node",
        )


def option_arguments(options: Mapping[str, Any], *, joined: Collection[str] = ()) -> list[str]:
    """Return options as arguments of a command; a name ends with "_" if Python has the word.

    Args:
        options: the value of each option; None and False leave it out.
        joined: options with one argument, in which commas separate several values.
    """
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.strip('_').replace('_', '-')}"
        if value is True:
            words.append(option)
        elif name in joined and value is not None:
            words += [option, ",".join(value)]
        elif value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else [value]
            words += [word for each in values for word in (option, str(each))]
    return words


def headwise_command(*arguments: str) -> list[str]:
    """Return ``headwise ARGUMENTS`` as a program with its arguments."""
    return [sys.executable, "-m", "headwise", *arguments]


def launch_command(command: Sequence[str], *, count: int, interrupted: Callable[[], str]) -> int:
    """Run a command in ``count`` processes, print how it failed, and return the exit status.

    Args:
        command: the program and its arguments.
        count: the number of processes.
        interrupted: returns the line to print after Ctrl-C.
    """
    from headwise.cli.output import stderr_console
    from headwise.sharding.processes.launch import launch

    console = stderr_console()
    try:
        outcome = launch(command, count=count)
    finally:
        console.show_cursor()  # a progress bar hides it, and its process may have been killed
    if outcome.interrupted_by is not None:
        console.print(interrupted(), markup=False)
        return 128 + outcome.interrupted_by
    if outcome.text:
        print_error(outcome.text)
    return outcome.status


class CommandJob:
    """Context of a command that runs on every rank: the first failure is printed, once.

    The launcher of ``--processes`` prints the message after all processes have ended; under
    torchrun the rank that fails first does.

    Args:
        timeout: seconds without a sign of life after which a rank counts as lost.
        ends_at_once: True if a rank ends in the middle of its work as soon as another has failed.
            False if an error of another rank lets it tidy up first; a lost rank never does.
    """

    def __init__(self, timeout: float, *, ends_at_once: bool) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded
        from headwise.sharding.processes.job import open_torchrun_job
        from headwise.sharding.processes.launch import LAUNCHED

        self._job: Job = open_torchrun_job(timeout=timeout, on_lost=self._end_now)
        self._ends_at_once = ends_at_once
        self._has_launcher = LAUNCHED in os.environ
        self._parent = os.getppid()

    def __enter__(self) -> Job:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher prints what was interrupted
        return self._job.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                self._job.leave_when_all_done()
            except LostProcessError as lost:
                error = lost
            else:
                self._job.close()
                return
        status = self._report_failure(error) if isinstance(error, Exception) else 0
        if status not in (0, LOST) and not self._ends_at_once:
            self._job.barrier_with_timeout("ended", seconds=TIDY_UP)
        self._job.__exit__(type(error), error, trace)
        if status:
            raise SystemExit(status) from None

    def _end_now(self, error: LostProcessError) -> None:
        """End this process in the middle of its work; no file is half-written by that."""
        if not self._ends_at_once and self._has_recorded_failure():
            return  # the error is raised in the main thread
        status = self._report_failure(error)
        sys.stderr.flush()
        os._exit(status)

    def _has_recorded_failure(self) -> bool:
        """True after an error that a rank has recorded, False after the loss of a rank."""
        try:
            failure = self._job.first_failure()
        except LostProcessError:
            return False
        return failure is not None and failure.status != LOST

    def _report_failure(self, error: Exception) -> int:
        """Record, leave or print the message of the first failure, and return its status."""
        if isinstance(error, HeadwiseError):
            text, status = join_error_lines(*error.lines(option_text)), exit_status_of_error(error)
        else:
            text, status = f"rank {self._job.rank} stopped at a bug in headwise", CRASHED
            traceback.print_exception(error)
        first = self._job.record_failure(text, status=status)
        if first is None:  # the store is gone, and nobody can be told
            if self._job.rank == 0:
                print_error(NO_LAUNCHER if self._launcher_has_ended() else text)
            return LOST
        self._leave_failure_message(first)
        return first.status

    def _launcher_has_ended(self) -> bool:
        """True if the parent has changed; the system closes its sockets a moment before that."""
        end = time.monotonic() + 1.0
        while os.getppid() == self._parent and time.monotonic() < end:
            time.sleep(0.02)
        return os.getppid() != self._parent

    def _leave_failure_message(self, failure: Failure) -> None:
        from headwise.sharding.processes.launch import leave_failure_message

        leave_failure_message(failure.text)
        if failure.rank == self._job.rank and not self._has_launcher:
            print_error(failure.text)
