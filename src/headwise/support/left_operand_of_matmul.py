"""Base class of objects that multiply a tensor by ``@``, in eager mode and when compiled."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

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
