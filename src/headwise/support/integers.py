"""Integers that a caller gives, in a dtype that does not wrap.

In uint8, ``0 - 1`` is 255 and ``200 + 100`` is 44; torch cannot index by int16, and cannot compare
a uint16 tensor with an int64 one. Every integer tensor is therefore widened where it enters.
"""

from __future__ import annotations

import operator
from contextlib import suppress

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.support.tracing import may_check_values


def as_int64(tensor: Tensor, name: str) -> Tensor:
    """Return the same integers in int64; the tensor itself if it holds them in int64 already.

    Raises:
        OptionError: no tensor of integers, or uint64 numbers that int64 cannot hold (in eager mode
            on the CPU).
    """
    if not isinstance(tensor, Tensor) or not is_integer(tensor):
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise OptionError(
            saw=f"{name} of type {kind}",
            needed="a tensor of integers",
            do=f"e.g. torch.tensor([0]) for {name}",
        )
    wide = tensor.long()
    if tensor.dtype == torch.uint64 and may_check_values(tensor) and bool((wide < 0).any()):
        raise OptionError(
            saw=f"{name} of dtype torch.uint64 with numbers of 2**63 or more",
            needed="numbers below 2**63",
            do=f"number the {name} from 0",
        )
    return wide


def as_count(value: object) -> int | None:
    """Return an integer of any library as Python's, or None for all that is no integer.

    The symbol of a compiled graph stays what it is.
    """
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    with suppress(TypeError):  # raised for all that is no integer
        return operator.index(value)  # type: ignore[arg-type]
    return None


def is_integer(tensor: Tensor) -> bool:
    """True if the dtype is an integer one, of any width; bool is none."""
    kinds = tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool
    return not any(kinds)
