"""Attention hooks: observe or replace the head outputs that layers compute.

A layer passes its `AttentionMatrix`, values and head outputs to the hook of the current context,
and continues with the head outputs that the hook returns. No layer is rewritten or wrapped.
Compiled graphs call no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from headwise.matrix.operator import AttentionMatrix

# (matrix, values (batch, kv_heads, keys, value_dim), head outputs (batch, heads, queries,
# value_dim)) -> the head outputs that the layer uses: the same, or a replacement.
AttentionHook = Callable[[AttentionMatrix, Tensor, Tensor], Tensor]

_hook: ContextVar[AttentionHook | None] = ContextVar("headwise_attention_hook", default=None)


@contextmanager
def attention_hook(hook: AttentionHook) -> Iterator[None]:
    """Call ``hook`` for every attention that a layer computes in this block, in this thread."""
    token = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(token)


def has_attention_hook() -> bool:
    """True if a hook is active in this context."""
    return not torch.compiler.is_compiling() and _hook.get() is not None


def call_hook(matrix: AttentionMatrix, v: Tensor, outputs: Tensor) -> Tensor:
    """Return what the active hook returns, or ``outputs`` without a hook."""
    hook = None if torch.compiler.is_compiling() else _hook.get()
    return outputs if hook is None else hook(matrix, v, outputs)
