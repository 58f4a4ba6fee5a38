"""Checks for tracing, compilation and autocast, products of operators, and temporary modes."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.support import private_torch


def may_read_values(tensor: Tensor) -> bool:
    """True if a value can be read now: a plain tensor, and no tracing, transform or capture.

    A check of values is made only then. It would end a compiled graph, become a constant in a
    trace, fail under vmap and on the meta device, and break the capture of a CUDA graph.
    """
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        and not torch.compiler.is_compiling()
        and not is_jit_tracing()
        and not private_torch.is_in_functorch(unknown=True)
        and not private_torch.is_in_dispatch_mode()
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def may_check_values(tensor: Tensor) -> bool:
    """True if values may be checked on every call: reading them waits for no accelerator."""
    return tensor.device.type == "cpu" and may_read_values(tensor)


def cast_like_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype that autocast gives torch's own operator."""
    kind = tensors[0].device.type
    if not is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products keep their operands' dtype.

    The meta device has no autocast to switch off.
    """
    kind = tensor.device.type
    return (
        torch.autocast(kind, enabled=False)
        if torch.amp.is_autocast_available(kind)
        else nullcontext()
    )


def is_jit_tracing() -> bool:
    """True while torch.jit.trace records, or the older exporter to ONNX, which uses it."""
    return not torch.compiler.is_compiling() and bool(
        torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def is_recording_operators() -> bool:
    """True while operators are recorded, to be run with other sizes: compiled, exported, traced."""
    return torch.compiler.is_compiling() or is_jit_tracing()


def is_certain(comparison: bool) -> bool:
    """True if a comparison of sizes holds; compiled, if it holds for all sizes of the graph."""
    if not torch.compiler.is_compiling():
        return comparison
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(comparison)


def is_autocast_enabled(kind: str) -> bool:
    """True if autocast is on for this type of device, such as "cpu"."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def needs_plain_torch() -> bool:
    """True where headwise's operators do not work: export to ONNX, forward-mode AD, torch.func."""
    if torch.onnx.is_in_onnx_export():
        return True
    if torch.compiler.is_compiling():
        return False
    # An unknown state counts as no torch.func: torch's error there beats a silent use of memory.
    return private_torch.is_in_forward_mode() or private_torch.is_in_functorch(unknown=False)


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


@contextmanager
def evaluation_mode(model: nn.Module | None) -> Iterator[None]:
    """Put every module in evaluation mode while the block runs, then restore the modes.

    ``eval()`` is not called, because some modules override it to do more than set the flag.
    """
    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices of small models gain nothing from a second thread, and lose much on a busy machine.

    The number of threads is a setting of the process and is restored afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_MATMULS = (operator.matmul, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class LeftOperand(ABC):
    """``self @ tensor``, also as ``torch.matmul(self, tensor)``."""

    @abstractmethod
    def __matmul__(self, tensor: Tensor) -> Tensor: ...

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Serve the matrix products; everything else stays undefined."""
        if func not in _MATMULS or len(args) != 2 or kwargs:
            return NotImplemented
        left, right = args
        if torch.compiler.is_compiling() and isinstance(left, Tensor):
            # Dynamo moves the tensor of a mixed product to the front. Only ``self @ tensor``
            # exists, so nothing else can be meant.
            left, right = right, left
        return left.__matmul__(right) if isinstance(left, cls) else NotImplemented
