"""Calls of a store of torch.distributed that end, also where the store's process is stopped."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from torch.distributed.distributed_c10d import Store

from headwise.errors import LostProcessError
from headwise.sharding.processes.life_signs import lost_store_error


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
