"""Tensors in nested lists, tuples and mappings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import DTypeError


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


def tensors_of_arrays(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the same names with each NumPy array, or array of JAX, as a tensor.

    Raises:
        DTypeError: an array without numbers that torch has.
    """
    arrays = {
        name: np.asarray(value)
        for name, value in state.items()
        if hasattr(value, "__array__") and not isinstance(value, Tensor)
    }
    return (
        {**state, **{n: _to_tensor(n, array) for n, array in arrays.items()}} if arrays else state
    )


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
