"""Launching the same command in several processes on this machine, by torch's elastic launcher.

torchrun prints some fifty lines about a process that ends. Here the launcher is silent, and
`launch` returns or raises what the command is to print.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from headwise.errors import LostProcessError

GRACE = 10  # seconds from SIGTERM to SIGKILL after an interrupt; after a failure torch takes 30
LAUNCHED = "HEADWISE_LAUNCHED"  # set in the processes that `launch` starts
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where a process leaves the reason of its failure
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


class JobOutcome(NamedTuple):
    """The end of a job.

    Attributes:
        status: the exit status of the process that failed first; 0 if none failed.
        text: the message of this process.
        interrupted_by: the signal that ended the launcher and all processes, or None.
    """

    status: int
    text: str = ""
    interrupted_by: int | None = None


def launch(command: Sequence[str], *, count: int) -> JobOutcome:
    """Run a command in ``count`` processes, each with its rank in the environment, to the end.

    No process outlives the launcher: when the launcher is killed, its store is gone with it, and
    each process ends at its next sign of life.

    Args:
        command: the program and its arguments.
        count: the number of processes.

    Raises:
        LostProcessError: a process was ended by a signal, or left no message.
    """
    with ExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="headwise-"))
        stack.enter_context(_set_process_environment(count))
        stack.enter_context(_silence_launcher_logs())
        interrupts = stack.enter_context(_interrupts_as_sigterm())
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="headwise",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
            shutdown_timeout=GRACE,
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except SignalException as error:
            return JobOutcome(0, interrupted_by=signal.SIGINT if interrupts else error.sigval)
        except ChildFailedError as error:
            return _outcome_of_failures(error.failures, count)
        except (dist.DistError, OSError) as error:
            raise LostProcessError(
                saw=f"{count} processes that could not be started: {str(error).splitlines()[0]}",
                needed="a free port on this machine, and room for the processes",
                do="run the command again, or without --processes",
            ) from error
    return JobOutcome(0)


def leave_failure_message(text: str) -> None:
    """Leave the reason of a failure where the launcher of this process looks for it."""
    if path := os.environ.get(ERROR_FILE):
        Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time())}), "utf-8")


def _outcome_of_failures(failures: dict[int, ProcessFailure], count: int) -> JobOutcome:
    """Return the message that a failed process has left."""
    for failure in failures.values():
        text = failure.error_file_data.get("message")
        if failure.exitcode > 0 and Path(failure.error_file).is_file() and text:
            return JobOutcome(failure.exitcode, str(text))
    rank, failure = min(failures.items(), key=lambda pair: pair[1].timestamp)
    if failure.exitcode < 0:
        ended = f"was ended by {failure.signal_name()}"
    else:
        ended = f"ended with status {failure.exitcode}"
    out_of_memory = failure.exitcode == -signal.SIGKILL
    raise LostProcessError(
        saw=f"rank {rank} of {count} (process {failure.pid}) {ended}",
        needed="every process until the work is done",
        do="run the same command again: it resumes from what is done"
        + ("; with fewer processes if memory ran out" if out_of_memory else ""),
    )


@contextmanager
def _set_process_environment(count: int) -> Iterator[None]:
    """Divide the threads of this machine among the processes, unless OMP_NUM_THREADS is set."""
    before = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // count)))
    os.environ[LAUNCHED] = "1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _silence_launcher_logs() -> Iterator[None]:
    """Keep the launcher's log off the terminal; its loggers have levels of their own."""
    silent = [(logging.getLogger(name), logging.NullHandler()) for name in _LOGGERS]
    before = [logger.propagate for logger, _ in silent]
    for logger, handler in silent:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for (logger, handler), propagate in zip(silent, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


@contextmanager
def _interrupts_as_sigterm() -> Iterator[list[int]]:
    """End the processes by SIGTERM on Ctrl-C, since they would print a traceback on SIGINT.

    Yield a list that is not empty after an interrupt.
    """
    interrupts: list[int] = []

    def interrupt(number: int, _: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupts.append(number)
        raise SignalException("interrupted", signal.SIGTERM)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
