"""What only eager mode can do, reading a value; and what autocast does, and must not touch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def may_read_values(tensor: Tensor) -> bool:
    """Whether a value can be read now: a plain tensor, nothing tracing, transforming or capturing.

    A check of values is made only then. It would end a compiled graph, become a constant in a
    trace, fail under vmap and on the meta device, and break the capture of a CUDA graph.
    """
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def is_traced() -> bool:
    """True while torch.jit.trace, or an export by it, records."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


def may_check_values(tensor: Tensor) -> bool:
    """Whether values may be checked on every call: where reading them waits for no accelerator."""
    return tensor.device.type == "cpu" and may_read_values(tensor)


def as_autocast_has_it(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In one dtype where autocast is on, as it hands them to torch's own operator."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Products keep their operands' dtype. The meta device has no autocast to switch off."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
