"""Public names of a room, each loaded from its module on first use, and modules that moved."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

from headwise.errors import join_error_lines

# The modules of layers in 0.1.0, and before 0.2.0. A pickle of a whole layer names its module.
OLD_LAYERS = frozenset(("headwise.layer", "headwise.drop_in", "headwise.layers.native"))


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


class OldLayers(MetaPathFinder):
    """Finder of no module, which refuses those of `OLD_LAYERS` by name."""

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> None:
        """Raise ModuleNotFoundError for a module of `OLD_LAYERS`."""
        if fullname not in OLD_LAYERS:
            return
        raise ModuleNotFoundError(
            join_error_lines(
                f"{fullname} is a module of an earlier headwise, named by a pickle of a layer",
                "the weights of the layer, which load in every version",
                "where that version is installed: torch.save(layer.state_dict(), path); here:"
                " layer.load_state_dict(torch.load(path))",
            ),
            name=fullname,
        )
