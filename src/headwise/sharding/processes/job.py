"""The processes of one job: the store that they share, and signs of life of each other.

A store of torch.distributed hands out work, counts what is done and carries the first failure to
all ranks. It needs no collective call, so ranks may be at different places of their work.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from headwise.errors import LostProcessError, OptionError
from headwise.sharding.checks import require_process_group
from headwise.sharding.processes.signs import OnLost, StoreCalls, WatchedPeers, lost_store_error

TIMEOUT = 60.0  # seconds without a sign of life after which a rank counts as lost
POLL = 0.05  # seconds between two looks at a key
_numbers = itertools.count()


class Failure(NamedTuple):
    """The first failure of a job: the rank, the exit status of its process, and the message."""

    rank: int
    status: int
    text: str


class Job:
    """The ranks that work on one job, with the keys of their store.

    Use it as a context manager: an exception on one rank ends the job on all of them.

    Args:
        store: the store that all ranks reach, with a prefix of this job.
        rank: the number of this process.
        count: the number of processes.
        timeout: seconds without a sign of life after which a rank counts as lost.
        on_lost: called in a thread of its own as soon as another rank is lost or has failed;
            without it, the next call of a method raises.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        count: int,
        timeout: float = TIMEOUT,
        on_lost: OnLost | None = None,
    ) -> None:
        self.rank, self.count, self._timeout = rank, count, timeout
        self._call = StoreCalls(store, timeout)
        documented: Any = store  # torch's stubs have no `clone`, which opens another connection
        self._peers = WatchedPeers(
            documented.clone(), rank=rank, count=count, timeout=timeout, on_lost=on_lost
        )

    def __enter__(self) -> Job:
        self._peers.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.leave_when_all_done()
            else:
                self.record_failure(str(error) or type(error).__name__)
        finally:
            self.close()

    def leave_when_all_done(self) -> None:
        """Wait until every rank has done its work; rank 0, which may hold the store, leaves last.

        A rank that stops at its end would be missed by nobody if the others had left.

        Raises:
            LostProcessError: another rank is lost or has failed.
        """
        self.barrier("work done")
        if self.rank == 0:
            self.barrier_with_timeout("left", seconds=self._timeout)
        else:
            self.arrive("left")

    def close(self) -> None:
        """End the signs of life and the connection to the store."""
        self._peers.stop()
        self._call.close()

    # ---- work ------------------------------------------------------------------------------

    def take_next_number(self, name: str) -> int:
        """Return the next of the numbers 0, 1, 2, ..., each of which one rank gets.

        Raises:
            LostProcessError: another rank is lost or has failed.
        """
        self.require_all_ranks_alive()
        return self.add_to_counter(name, 1) - 1

    def add_to_counter(self, name: str, amount: int) -> int:
        """Add to a number that all ranks share, from 0 on, and return the sum."""
        return int(self._call("add", name, amount))

    def arrive(self, name: str) -> bool:
        """Count this rank as one that has come to a place; True for the last of them."""
        return self.add_to_counter(f"arrived/{name}", 1) == self.count

    def announce(self, name: str, text: str = "") -> None:
        """Let the ranks go on that wait for a name."""
        self._call("set", f"announced/{name}", text)

    def is_announced(self, name: str) -> bool:
        """True once a rank has announced a name.

        Raises:
            LostProcessError: another rank is lost or has failed.
        """
        self.require_all_ranks_alive()
        return bool(self._call("check", [f"announced/{name}"]))

    def wait_for_announcement(
        self, name: str, *, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until a rank announces a name.

        Args:
            name: the name.
            meanwhile: called a few times a second.

        Raises:
            LostProcessError: another rank is lost or has failed.
        """
        while not self.is_announced(name):
            meanwhile()
            time.sleep(POLL)

    def barrier(self, name: str) -> None:
        """Wait until every rank has come to a place.

        Raises:
            LostProcessError: another rank is lost or has failed.
        """
        if self.arrive(name):
            self.announce(name)
        else:
            self.wait_for_announcement(name)

    def barrier_with_timeout(self, name: str, *, seconds: float) -> None:
        """Wait until every rank has come to a place, at most so many seconds."""
        end = time.monotonic() + seconds
        try:
            self.arrive(name)
            while self.add_to_counter(f"arrived/{name}", 0) < self.count and time.monotonic() < end:
                time.sleep(POLL)
        except LostProcessError:  # nobody is left to wait for
            return

    def require_same(self, values: Mapping[str, str]) -> None:
        """Compare short texts, such as digests, over all ranks.

        Raises:
            OptionError: on every rank, if a value differs between ranks.
            LostProcessError: another rank is lost or has failed.
        """
        self._call("set", f"values/{self.rank}", json.dumps(dict(values), sort_keys=True))
        self.barrier("values")
        first = json.loads(self._call("get", "values/0"))
        for rank in range(1, self.count):
            other = json.loads(self._call("get", f"values/{rank}"))
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    raise OptionError(
                        saw=f"{name} of rank {rank}, which differs from {name} of rank 0",
                        needed=f"the same {', '.join(first)} on all {self.count} ranks",
                        do="start every process with the same arguments, and load the same files",
                    )

    # ---- failures --------------------------------------------------------------------------

    def record_failure(self, text: str, *, status: int = 1) -> Failure | None:
        """Record a failure unless there was one before, and return the first of the job.

        Return None if the store is gone, so that no other rank can be reached.
        """
        failure = json.dumps(Failure(self.rank, status, text))
        try:
            return Failure(*json.loads(self._call("compare_set", "failure", "", failure)))
        except LostProcessError:
            return None

    def first_failure(self) -> Failure | None:
        """Return the first failure that a rank has recorded, if there is one.

        Raises:
            LostProcessError: the store is gone.
        """
        if not self._call("check", ["failure"]):
            return None
        return Failure(*json.loads(self._call("get", "failure")))

    def require_all_ranks_alive(self) -> None:
        """Raise LostProcessError if another rank is lost or has failed."""
        if self._peers.error is not None:
            raise self._peers.error


def open_group_job(call: str, *, timeout: float = TIMEOUT, on_lost: OnLost | None = None) -> Job:
    """Return a job of the ranks of the default process group.

    Args:
        call: the call that needs the group, as the caller wrote it. Every rank makes the same
            calls in the same order.
        timeout: as for `Job`.
        on_lost: as for `Job`.

    Raises:
        OptionError: there is no process group.
    """
    require_process_group(call)
    group: Any = dist.group.WORLD
    store = PrefixStore(f"headwise/{next(_numbers)}", group.get_group_store())
    rank, count = dist.get_rank(), dist.get_world_size()
    return Job(store, rank=rank, count=count, timeout=timeout, on_lost=on_lost)


def open_torchrun_job(*, timeout: float = TIMEOUT, on_lost: OnLost | None = None) -> Job:
    """Return the job of the processes that torchrun started, by the store that it holds.

    Raises:
        LostProcessError: the store cannot be reached.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, rank, count = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    except dist.DistError as error:
        raise lost_store_error(f"at {address} cannot be reached") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"headwise/attempt-{attempt}", store)
    return Job(store, rank=rank, count=count, timeout=timeout, on_lost=on_lost)
