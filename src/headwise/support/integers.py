"""Conversion of integer arguments to dtypes that do not wrap.

In uint8, ``0 - 1`` is 255 and ``200 + 100`` is 44; torch cannot index by int16, and cannot compare
a uint16 tensor with an int64 one. Every integer argument is therefore widened.
"""

from __future__ import annotations

import operator
from contextlib import suppress

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.support.tracing import may_check_values


def convert_to_int64(tensor: Tensor, name: str) -> Tensor:
    """Return the integers in int64; the tensor itself if it is int64.

    Raises:
        OptionError: not a tensor of integers, or uint64 numbers that int64 cannot hold (checked in
            eager mode on the CPU).
    """
    if not isinstance(tensor, Tensor) or not has_integer_dtype(tensor):
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


def convert_to_int_or_none(value: object) -> int | None:
    """Return an integer of any library as an int, or None if ``value`` is not an integer.

    A SymInt of a compiled graph is returned as it is.
    """
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    with suppress(TypeError):  # not an integer
        return operator.index(value)  # type: ignore[arg-type]
    return None


def has_integer_dtype(tensor: Tensor) -> bool:
    """True for integer dtypes of any width, not for bool."""
    kinds = tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool
    return not any(kinds)
