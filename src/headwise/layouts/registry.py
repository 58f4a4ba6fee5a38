"""Registry of layouts by name: the catalogue, and the layouts that a user adds."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules

from headwise.errors import OptionError
from headwise.layouts import catalogue
from headwise.layouts._layout import Layout
from headwise.support.text import describe_value

_registered: dict[str, Layout] = {}


def layouts_by_name() -> dict[str, Layout]:
    """Return all layouts by name; those of the catalogue first."""
    return {member.name: member for family in layouts_by_family().values() for member in family}


def layouts_by_family() -> dict[str, tuple[Layout, ...]]:
    """Return all layouts by family: the first docstring line of each catalogue file."""
    registered = {"Registered here.": tuple(_registered.values())} if _registered else {}
    return {**catalogue_by_family(), **registered}


def layout(name: str | Layout) -> Layout:
    """Return the layout of that name; a `Layout` is returned as it is.

    Raises:
        OptionError: no layout has this name.
    """
    if isinstance(name, Layout):
        return name
    known = layouts_by_name()
    if name not in known:
        word = str(name).lower()  # also of a value that is no name
        near = [other for other in known if word in other]
        similar = get_close_matches(word, known, n=4, cutoff=0.5)
        near += [other for other in similar if other not in near]
        raise OptionError(
            saw=f"no layout is named {describe_value(name)}",
            needed=f"one of {len(known)}" + (f"; near are {', '.join(near)}" if near else ""),
            do="headwise layouts lists them; register adds one",
        )
    return known[name]


def register(new: Layout) -> Layout:
    """Add a layout under its name, for this process, and return it.

    `convert`, `detect` and `Attention.from_layout` then take the name.

    Raises:
        OptionError: the name is taken, or not in kebab case.
    """
    if new.name in layouts_by_name() or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", new.name):
        raise OptionError(
            saw=f"the name {new.name!r}",
            needed="a name in kebab case that no layout has yet",
            do="choose another one",
        )
    _registered[new.name] = new
    return new


@lru_cache(maxsize=1)
def catalogue_by_family() -> dict[str, tuple[Layout, ...]]:
    """Return the layouts of the catalogue by family."""
    by_family: dict[str, tuple[Layout, ...]] = {}
    names: set[str] = set()
    for entry in iter_modules(catalogue.__path__):
        module = import_module(f"{catalogue.__name__}.{entry.name}")
        for member in module.LAYOUTS:
            assert member.name not in names, f"two layouts are named {member.name}"
            names.add(member.name)
        by_family[(module.__doc__ or "").partition("\n")[0]] = tuple(module.LAYOUTS)
    return by_family
