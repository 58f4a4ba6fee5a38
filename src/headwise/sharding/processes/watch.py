"""`watch_ranks`: a training loop that ends with a sentence when another rank is lost.

A rank that waits in a collective call cannot raise. Without a watch it waits for the timeout of the
process group, which is 30 minutes for gloo, and outlives its launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from headwise.errors import LostProcessError
from headwise.sharding.processes.job import TIMEOUT, Job, open_group_job
from headwise.sharding.processes.signs import failed_rank_error

LOST = 75  # EX_TEMPFAIL of sysexits.h, as the exit status of a command


@contextmanager
def watch_ranks(*, timeout: float = TIMEOUT) -> Iterator[None]:
    """Watch the other ranks of the default process group during the block.

    A rank that fails, stops or is killed ends the block on all other ranks, also those that wait in
    a collective call: their processes print a sentence and end with status 75. So they do if the
    launcher is killed. Each rank gives signs of life in a thread of its own. All ranks use the
    block together.

    Args:
        timeout: seconds without a sign of life after which a rank counts as lost.

    Raises:
        OptionError: there is no process group.
        LostProcessError: a collective call lost its connection to another rank, which may have
            failed.
    """
    with open_group_job("watch_ranks()", timeout=timeout, on_lost=_end_process) as job:
        try:
            yield
        except RuntimeError as error:
            if not _is_lost_connection(error):
                raise
            raise _explain_lost_connection(job) from error


def _explain_lost_connection(job: Job) -> LostProcessError:
    """Return the error of the rank that failed, if one has left its message before it ended."""
    failure = job.first_failure()
    if failure is not None:
        return failed_rank_error(failure.rank, job.count, failure.text)
    return LostProcessError(
        saw="a collective call that lost its connection to another rank",
        needed="every rank until the work is done",
        do="start the same run again, from the last checkpoint",
    )


def _is_lost_connection(error: RuntimeError) -> bool:
    """True for the errors of NCCL and of the store, and for those of gloo, which have no class."""
    return isinstance(error, dist.DistError) or "/gloo/transport/" in str(error)


def _end_process(error: LostProcessError) -> NoReturn:
    """End this process from the thread that watches, while the main thread may wait for ever."""
    sys.stderr.write(f"headwise: {error}\n")
    sys.stderr.flush()
    os._exit(LOST)
