"""Signs of life between the ranks of a job.

Each rank counts up a number of its own in the store, and watches that of the next rank: of all
ranks that are stopped or gone, at least one is noticed by a rank that is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from torch.distributed.distributed_c10d import Store

from headwise.errors import LostProcessError

MOST_INTERVAL = 1.0  # seconds between two signs of life, at most
# A rank that has not begun may be loading torch from a slow disk: it has so many timeouts.
START_FACTOR = 5

OnLost = Callable[[LostProcessError], None]


class WatchedPeers:
    """Thread that gives signs of life, and looks for those of the next rank.

    A peer is lost if its number stands still over as many looks as the timeout has intervals.
    Looks are counted, not seconds: a process that is stopped itself, or sleeps with its machine,
    does not look.

    Attributes:
        error: the reason why the job cannot go on; None while it can.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        count: int,
        timeout: float,
        on_lost: OnLost | None,
    ) -> None:
        self.error: LostProcessError | None = None
        self._store, self._rank, self._count = store, rank, count
        self._timeout, self._on_lost = timeout, on_lost
        self._interval = min(MOST_INTERVAL, timeout / 5)
        self._ended = Event()
        self._peer, self._last, self._looks = (rank + 1) % count, 0, 0
        self._thread = Thread(target=self._watch, name="headwise life signs", daemon=True)

    def start(self) -> None:
        """Begin to give signs of life."""
        self._thread.start()

    def stop(self) -> None:
        """Give no more signs of life, after which the other ranks would miss this one."""
        self._ended.set()
        self._thread.join(timeout=2 * self._interval)

    def _watch(self) -> None:
        try:
            self._store.add(f"signs/{self._rank}", 1)
            while not self._ended.wait(self._interval):
                self._store.add(f"signs/{self._rank}", 1)
                error = (
                    None
                    if self.error
                    else self._find_recorded_failure_error() or self._find_lost_peer_error()
                )
                if error is not None:
                    self._report_lost(error)
        except RuntimeError as error:  # DistNetworkError and DistStoreError among them
            if not self._ended.is_set():
                self._report_lost(lost_store_error(f"is gone: {str(error).splitlines()[0]:.120}"))

    def _report_lost(self, error: LostProcessError) -> None:
        self.error = error
        if self._on_lost is not None and not self._ended.is_set():
            self._on_lost(error)

    def _find_recorded_failure_error(self) -> LostProcessError | None:
        """Return the error for a failure that another rank has recorded."""
        if not self._store.check(["failure"]):
            return None
        rank, _, text = json.loads(self._store.get("failure"))
        if rank == self._rank:
            return None
        return failed_rank_error(rank, self._count, text)

    def _find_lost_peer_error(self) -> LostProcessError | None:
        """Look at the next rank, and return the error if it is lost."""
        if self._peer == self._rank:
            return None
        signs = self._store.add(f"signs/{self._peer}", 0)
        if signs != self._last:
            self._last, self._looks = signs, 0
        self._looks += 1
        allowed = self._timeout * (1 if self._last else START_FACTOR)
        if self._looks * self._interval <= allowed:
            return None
        done = "given no sign of life" if self._last else "not begun"
        return LostProcessError(
            saw=f"rank {self._peer} of {self._count} has {done} for {allowed:g} s",
            needed="every rank until the work is done",
            do="start the same run again; if a process was only slow, with a longer timeout",
        )


def lost_store_error(fault: str) -> LostProcessError:
    """Return the error for a store that fails."""
    return LostProcessError(
        saw=f"the store of the job {fault}",
        needed="the process that holds the store, which is the launcher or rank 0",
        do="start the same run again",
    )


def failed_rank_error(rank: int, count: int, text: str) -> LostProcessError:
    """Return the error for a rank that has failed with a message."""
    return LostProcessError(
        saw=f"rank {rank} of {count} failed: {text.splitlines()[0]:.200}",
        needed="every rank until the work is done",
        do=f"remove the cause that rank {rank} names, and start the same run again",
    )


class StoreCalls:
    """A store whose calls are made in a thread, since a client waits for its answer without end.

    Args:
        store: the store.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        self._store, self._timeout = store, timeout
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...], SimpleQueue[Any]] | None]
        self._calls = SimpleQueue()
        Thread(target=self._serve, name="headwise store calls", daemon=True).start()

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store.

        Raises:
            LostProcessError: the store is gone, or does not answer in time.
        """
        answer: SimpleQueue[Any] = SimpleQueue()
        self._calls.put((method, arguments, answer))
        try:
            result = answer.get(timeout=self._timeout)
        except Empty:
            raise lost_store_error(f"has not answered for {self._timeout:g} s") from None
        if isinstance(result, LostProcessError):
            raise result
        return result

    def close(self) -> None:
        """End the thread, after the calls so far."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            method, arguments, answer = call
            try:
                answer.put(getattr(self._store, method)(*arguments))
            except RuntimeError as error:  # DistNetworkError and DistStoreError among them
                answer.put(lost_store_error(f"failed: {str(error).splitlines()[0]:.120}"))
