"""Lazy exports of a room: its public names, each loaded from its module on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def export_lazily(
    room: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        room: the ``__name__`` of the package.
        homes: the module of each public name, relative to the package. Type checkers and the
            reference read the same names below ``if TYPE_CHECKING``; a test compares the two.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(import_module(f"{room}.{homes[name]}"), name)
        setattr(sys.modules[room], name, value)  # later accesses skip this function
        return value

    names = sorted(homes)
    return load, lambda: names, names
