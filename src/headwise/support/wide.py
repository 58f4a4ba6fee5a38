"""Runs in float64 of code that casts to float32 on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.support.private_torch import TorchDispatchMode, tree_leaves, tree_map

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class WideMode(TorchFunctionMode):
    """Mode in which each cast to float32 is one to float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function with float64 in the place of float32."""
        if func is Tensor.float:
            func = Tensor.double
        args, kwargs = tree_map(_widen, (args, kwargs or {}))
        return func(*args, **kwargs)


class NarrowSteps(TorchDispatchMode):
    """Mode that notices results in float32 and narrower.

    Attributes:
        is_seen: True once there was one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_seen = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, and look at the dtype of its results."""
        result = func(*args, **(kwargs or {}))
        leaves = (x for x in tree_leaves(result) if isinstance(x, Tensor))
        self.is_seen = self.is_seen or any(x.dtype in _NARROW for x in leaves)
        return result


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def default_float64() -> Iterator[None]:
    """Make float64 the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def in_float64() -> Iterator[NarrowSteps]:
    """Make float64 the default, and the dtype of each cast to float32."""
    with default_float64(), NarrowSteps() as narrow, WideMode():
        yield narrow
