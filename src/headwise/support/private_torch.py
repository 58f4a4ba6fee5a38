"""Private functions of torch, each with its fallback for versions that lack it.

No other file of the library names a private part of torch (tests/test_house.py). Each part is
looked up once, at import. Where it is missing, the results stay the same within rounding, and only
speed, memory or a check of values is lost:

| private part of torch | where it is missing |
| --- | --- |
| `mkldnn._linear_pointwise` | `kernels.linear` computes by `torch.nn.functional.linear` |
| `_C._functorch.peek_interpreter_stack` | the caller of `is_in_functorch` says what to assume |
| `forward_ad._current_level` | `is_in_forward_mode` asks torch to make a dual tensor |
| `_C._len_torch_dispatch_stack` | `is_in_dispatch_mode` answers yes: values are not checked |
| `_C._len_torch_function_stack` | `is_recorded` answers yes: modules are called |
| `_C._autograd._profiler_enabled` | the same |
| `Tensor._make_wrapper_subclass` | masks of transformers' models are written |
| `_C._disabled_torch_function_impl` | the same |
| `utils._python_dispatch.TorchDispatchMode` | operators are not counted: ImportError |
| `utils._python_dispatch.is_traceable_wrapper_subclass` | `is_wrapper` asks the tensor itself |
| `_C._vmapmode_increment_nesting`, `_C._vmapmode_decrement_nesting` | batched gradients raise |
| `_C._functorch.is_legacy_batchedtensor` | the same |
| `_remove_batch_dim`, `_add_batch_dim` | the same |
"""

from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


def find_torch_attribute(path: str) -> Any:
    """Return the attribute at a dotted path inside torch, or None if torch lacks it."""
    part: Any = torch
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


_linear_pointwise = find_torch_attribute("ops.mkldnn._linear_pointwise")
_interpreter_stack = find_torch_attribute("_C._functorch.peek_interpreter_stack")
_dispatch_modes = find_torch_attribute("_C._len_torch_dispatch_stack")
_function_modes = find_torch_attribute("_C._len_torch_function_stack")
_is_profiling = find_torch_attribute("_C._autograd._profiler_enabled")
_make_wrapper = find_torch_attribute("Tensor._make_wrapper_subclass")
_is_wrapper = find_torch_attribute("utils._python_dispatch.is_traceable_wrapper_subclass")
_enter_vmap = find_torch_attribute("_C._vmapmode_increment_nesting")
_leave_vmap = find_torch_attribute("_C._vmapmode_decrement_nesting")
_is_batched = find_torch_attribute("_C._functorch.is_legacy_batchedtensor")
_remove_batch = find_torch_attribute("_remove_batch_dim")
_add_batch = find_torch_attribute("_add_batch_dim")
no_torch_function = find_torch_attribute("_C._disabled_torch_function_impl")

# (x, weight, bias) -> x @ weight.T + bias by oneDNN's product, where `HAS_ONEDNN_LINEAR`.
onednn_linear = _linear_pointwise and partial(
    _linear_pointwise, attr="none", scalars=[], algorithm=""
)
HAS_ONEDNN_LINEAR = torch.backends.mkldnn.is_available() and _linear_pointwise is not None
HAS_BATCHES = None not in (_enter_vmap, _leave_vmap, _is_batched, _remove_batch, _add_batch)
HAS_WRAPPERS = _make_wrapper is not None and no_torch_function is not None

# The name by which `torch._ops.OpOverload.name` tells one of torch's private operators.
TO_COPY = "aten::_to_copy"


def is_in_functorch(*, unknown: bool) -> bool:
    """True if a transform of torch.func (grad, vmap, ...) runs; ``unknown`` if torch hides it."""
    return unknown if _interpreter_stack is None else _interpreter_stack() is not None


def is_in_forward_mode() -> bool:
    """True if forward-mode differentiation is running."""
    level: int | None = getattr(forward_ad, "_current_level", None)
    if level is not None:
        return level >= 0
    try:
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
    except RuntimeError:  # torch makes dual tensors inside of a level only
        return False
    return True


def is_in_dispatch_mode() -> bool:
    """True if a dispatch mode is on: torch fakes, counts or changes every operator."""
    return _dispatch_modes is None or _dispatch_modes() > 0


def is_recorded() -> bool:
    """True if a mode or a profiler sees the functions of torch that are called."""
    if _function_modes is None or _is_profiling is None:
        return True
    return bool(_function_modes() or is_in_dispatch_mode() or _is_profiling())


def make_wrapper(
    kind: type, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a tensor of this class without memory, where `HAS_WRAPPERS`."""
    return _make_wrapper(kind, shape, dtype=dtype, device=device)


def is_wrapper(tensor: Tensor) -> TypeGuard[Any]:
    """True if a tensor is made of other tensors, as quantised and sharded ones are."""
    if _is_wrapper is None:
        return hasattr(tensor, "__tensor_flatten__")
    return bool(_is_wrapper(tensor))


def batch_level() -> int:
    """Return the depth of `torch.autograd.grad(..., is_grads_batched=True)`, where `HAS_BATCHES`.

    That function batches its gradients by an older vmap than torch.func's.
    """
    level: int = _enter_vmap() - 1
    _leave_vmap()
    return level


def remove_batch(value: Any, level: int) -> tuple[Any, int | None]:
    """Return a tensor with its batch as axis 0, and 0; or a value without a batch, and None."""
    if isinstance(value, Tensor) and _is_batched(value):
        return _remove_batch(value, level, 1, 0), 0
    return value, None


def add_batch(tensor: Tensor, level: int) -> Tensor:
    """Return a tensor whose axis 0 is a batch: the inverse of `remove_batch`."""
    batched: Tensor = _add_batch(tensor, 0, level)
    return batched


class _NoDispatchMode:
    def __init__(self) -> None:
        raise ImportError(
            f"torch {torch.__version__} has no TorchDispatchMode, by which headwise counts the"
            " operators of a call. Install another version of torch to count them."
        )


DispatchMode: Any = (
    find_torch_attribute("utils._python_dispatch.TorchDispatchMode") or _NoDispatchMode
)


def break_compiled_graph(why: str) -> None:
    """End the graph that torch.compile makes, or refuse it with this reason if it must be whole."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=why)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_module_hooks(module: nn.Module) -> bool:
    """True if somebody sees the calls of a module: by hooks of its own, or of all modules."""
    everywhere = (getattr(nn.modules.module, f"_global{name}", None) for name in _HOOKS)
    return any(everywhere) or any(getattr(module, name, None) for name in _HOOKS)


# What a call of a torch.nn.Linear runs, as torch wrote it.
_CALLED = ("__call__", "_call_impl", "forward")
_TORCHS = tuple(getattr(nn.Linear, name, None) for name in _CALLED)
_PATCHES = {*_CALLED, "weight", "bias"}


def is_call_replaced(module: nn.Module) -> bool:
    """True if a call of a linear module runs something else than torch wrote, or is compiled."""
    held = module.__dict__
    is_torchs = all(
        getattr(type(module), name, None) is part
        for name, part in zip(_CALLED, _TORCHS, strict=True)
    )
    is_compiled = held.get("_compiled_call_impl") is not None
    return not is_torchs or is_compiled or not held.keys().isdisjoint(_PATCHES)
