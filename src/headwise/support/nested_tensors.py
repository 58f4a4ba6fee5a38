"""Tensors in nested lists, tuples and mappings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def leaves(value: Any) -> Iterator[Any]:
    """Yield every value that is no container, in order: dataclasses are containers too."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, (list, tuple, deque)):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return lists, tuples and dicts of the same form, with ``function`` of every other value."""
    if isinstance(value, dict):
        return {key: mapped(function, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(function, part) for part in value])
    return function(value)
