"""A function of a model type, in a process that may not take long, nor much memory."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SECONDS, BYTES = 60, 8 * 2**30


def guarded(function: Callable[[str], Any], model_type: str, *, seconds: int = SECONDS) -> Any:
    """What the function returns, in a forked process; in words why not, where it does not end."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(function, model_type, send))
    process.start()
    send.close()
    try:
        if receive.poll(seconds):
            return receive.recv()
        return f"not done after {seconds} s"
    except EOFError:
        process.join()
        return f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _child(function: Callable[[str], Any], model_type: str, send: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    send.send(function(model_type))
