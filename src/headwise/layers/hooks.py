"""Who is shown the attention that layers compute: the seam between a model and whoever looks in.

A layer that computes by an `AttentionMatrix` shows it, with its values and its head outputs, to the
watcher of the running context, and goes on with the head outputs that the watcher gives back. No
layer is rewritten or wrapped for that. A compiled graph shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from headwise.attention_matrix import AttentionMatrix

# (matrix, values (batch, kv_heads, keys, value_dim), head outputs (batch, heads, queries,
# value_dim)) -> the head outputs to go on with: the same, or others in their place.
Watcher = Callable[[AttentionMatrix, Tensor, Tensor], Tensor]

_watcher: ContextVar[Watcher | None] = ContextVar("headwise_watcher", default=None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Show ``watcher`` what layers compute while the block runs, in this thread."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def is_watched() -> bool:
    """Whether anyone is shown what a layer computes now."""
    return not torch.compiler.is_compiling() and _watcher.get() is not None


def shown(matrix: AttentionMatrix, v: Tensor, outputs: Tensor) -> Tensor:
    """The head outputs to go on with, after the watcher has seen them."""
    watcher = None if torch.compiler.is_compiling() else _watcher.get()
    return outputs if watcher is None else watcher(matrix, v, outputs)
