"""Hooks that observe a running model: the attention of its layers, and passes of its modules.

A layer passes its `AttentionMatrix`, values and head outputs to the attention hook of the current
context, and continues with the head outputs that the hook returns. No layer is rewritten or
wrapped. Compiled graphs call no hook.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    return not torch.compiler.is_compiling() and _hook.get() is not None


def call_hook(matrix: AttentionMatrix, v: Tensor, outputs: Tensor) -> Tensor:
    hook = None if torch.compiler.is_compiling() else _hook.get()
    return outputs if hook is None else hook(matrix, v, outputs)


class ModuleRun(NamedTuple):
    """One forward pass of a module: its arguments, and its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def first(self) -> Any:
        """The first argument, positional or named; None if there is none."""
        return next(iter((*self.args, *self.kwargs.values())), None)


@contextmanager
def record_modules(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, list[ModuleRun]]]:
    """Record every pass of these modules while the block runs, in the order of the passes."""
    runs: dict[nn.Module, list[ModuleRun]] = {module: [] for module in modules}

    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        runs[module].append(ModuleRun(args, kwargs, output))

    with ExitStack() as stack:
        for module in runs:
            stack.enter_context(module.register_forward_hook(record, with_kwargs=True))
        yield runs
