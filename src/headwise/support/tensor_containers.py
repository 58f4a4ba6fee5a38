"""Tensors in nested lists, tuples and mappings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


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
