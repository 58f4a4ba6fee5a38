"""Real processes with a gloo process group, kept for many tests.

A test gives a function at the top of a module; each rank calls it and the results come back. The
ranks are forked from a server that has imported once what the tests import, so a group starts in a
second.
"""

import atexit
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LONGEST = 240  # seconds for one call on all ranks
GROUP_TIMEOUT = timedelta(seconds=120)
# Modules of tests, and what torch imports only when a tensor is first divided.
PRELOADED = (
    "headwise.sharding",
    "hypothesis.strategies",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.testing",
)


class RankError(AssertionError):
    """The traceback of a function that raised on a rank."""


class Ranks:
    """A group of processes, each of which runs what `run` gives it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._store = tempfile.mkdtemp(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *PRELOADED])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (there, rank, count, self._store, os.getcwd())
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` on every rank; return the results in the order of ranks.

        Raises:
            RankError: the function raised on a rank, or did not come back in time.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(LONGEST):
                self.close()
                raise RankError(f"rank {rank} did not answer in {LONGEST} s")
            answers.append(pipe.recv())
        if failures := [(rank, text) for rank, (text, _) in enumerate(answers) if text]:
            rank, text = failures[0]
            raise RankError(f"rank {rank} of {self.count}:\n{text}")
        return [value for _, value in answers]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        ranks.cache_clear()


@cache
def ranks(count: int) -> Ranks:
    """Return the processes of this many ranks; they end with the test run."""
    group = Ranks(count)
    atexit.register(group.close)
    return group


def _serve(pipe: Connection, rank: int, count: int, store: str, folder: str) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=count,
        store=dist.FileStore(str(Path(store) / "store"), count),
        timeout=GROUP_TIMEOUT,
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            answer = (None, function(*arguments))
        except Exception:  # noqa: BLE001 - every failure goes to the test
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
