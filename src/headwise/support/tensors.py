"""Tensors in nested containers, arrays as tensors, and integers in dtypes that do not wrap.

In uint8, ``0 - 1`` is 255 and ``200 + 100`` is 44; torch cannot index by int16, and cannot compare
a uint16 tensor with an int64 one. Every integer argument is therefore widened.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import DTypeError, OptionError
from headwise.support.tracing import may_check_values

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def iterate_leaves(value: Any) -> Iterator[Any]:
    """Yield every value that is not a container, in order; dataclasses are containers."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, (list, tuple, deque)):
        for part in value:
            yield from iterate_leaves(part)
    else:
        yield value


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same lists, tuples and dicts with ``function`` applied to all other values."""
    if isinstance(value, dict):
        return {key: map_leaves(function, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(function, part) for part in value])
    return function(value)


def tensors_of_arrays(state: object, *, title: str = "the state dict") -> Mapping[str, Tensor]:
    """Return the same names with each NumPy array, or array of JAX, as a tensor.

    Raises:
        OptionError: no mapping, or an entry that is no name with a tensor.
        DTypeError: an array without numbers that torch has.
    """
    if not isinstance(state, Mapping):
        raise OptionError(
            saw=f"weights of type {type(state).__name__}",
            needed="a state dict: names and tensors",
            do="give model.state_dict(), or safetensors.torch.load_file(path)",
        )
    arrays = {
        name: np.asarray(value)
        for name, value in state.items()
        if hasattr(value, "__array__") and not isinstance(value, Tensor)
    }
    if arrays:
        state = {**state, **{name: _to_tensor(name, array) for name, array in arrays.items()}}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise OptionError(
                saw=f"{title} with {name!r:.80}, a {type(tensor).__name__}",
                needed="names and tensors",
                do="give the part that holds the tensors, or leave this entry out",
            )
    return state


def _to_tensor(name: str, array: np.ndarray) -> Tensor:
    """Return the numbers of an array; they are copied if torch cannot take them in their place."""
    is_bfloat16 = array.dtype.name == "bfloat16"  # of ml_dtypes; NumPy has none of its own
    try:
        plain = array.view(np.int16) if is_bfloat16 else array
        native = np.require(plain, plain.dtype.newbyteorder("="), ["C", "W"])
        tensor = torch.from_numpy(native)
    except TypeError as error:
        raise DTypeError(
            saw=f"{name}, a NumPy array of {array.dtype}",
            needed="an array of numbers that torch has",
            do="array.astype(numpy.float32), or leave this entry out",
        ) from error
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have the same shape, dtype and bits."""
    is_alike = a.shape == b.shape and a.dtype == b.dtype
    return is_alike and torch.equal(view_as_bits(a), view_as_bits(b))


def is_positive_zero(x: Tensor) -> bool:
    """True if every bit is 0; a negative zero has a bit set."""
    return not bool(view_as_bits(x).any())


def view_as_bits(x: Tensor) -> Tensor:
    """Return the bits of each entry as integers: NaNs equal themselves, and -0 differs from 0."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.contiguous().view(_BITS[x.element_size()])


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
    """Return an integer of any library as an int, a SymInt as it is; None for other values."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    with suppress(TypeError):  # not an integer
        return operator.index(value)  # type: ignore[arg-type]
    return None


def has_integer_dtype(tensor: Tensor) -> bool:
    """True for integer dtypes of any width, not for bool."""
    kinds = tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool
    return not any(kinds)
