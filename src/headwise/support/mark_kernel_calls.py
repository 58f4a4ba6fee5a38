"""Calls of torch's functions by headwise's own kernels, marked so that hooks on torch skip them.

The layer reports a kernel's attention itself. A hook on torch's functions would report the same
attention twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# None while nothing watches; then whether a kernel of headwise is calling.
_is_own: ContextVar[bool | None] = ContextVar("headwise_own_call", default=None)


@contextmanager
def track_kernel_calls() -> Iterator[None]:
    """Let `is_kernel_call` answer while the block runs, in this thread."""
    token = _is_own.set(False)
    try:
        yield
    finally:
        _is_own.reset(token)


def is_kernel_call() -> bool:
    """True if a kernel of headwise is calling."""
    return bool(_is_own.get())


def call_for_kernel(function: Callable[..., T], *operands: Any, **options: Any) -> T:
    """Call one of torch's functions for a kernel of headwise, or any whose caller reports it.

    A compiled graph shows nothing, so nothing is set in one.
    """
    if torch.compiler.is_compiling() or _is_own.get() is None:
        return function(*operands, **options)
    token = _is_own.set(True)
    try:
        return function(*operands, **options)
    finally:
        _is_own.reset(token)
