"""The layouts by their names: those of the catalogue, and those that a user adds."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules

from headwise.errors import OptionError
from headwise.layouts import catalogue
from headwise.layouts.layout import Layout
from headwise.support.axes import describe_value

_own: dict[str, Layout] = {}


def layouts() -> dict[str, Layout]:
    """All of them, by name; those of the catalogue first."""
    return {one.name: one for family in families().values() for one in family}


def families() -> dict[str, tuple[Layout, ...]]:
    """All of them, by what the files of the catalogue say of themselves, and a user's own."""
    own = {"Registered here.": tuple(_own.values())} if _own else {}
    return {**published(), **own}


def layout(name: str | Layout) -> Layout:
    """The layout of that name; a layout is itself.

    Raises:
        OptionError: there is none.
    """
    if isinstance(name, Layout):
        return name
    known = layouts()
    if name not in known:
        near = get_close_matches(name.lower(), known, n=4, cutoff=0.5)
        near += [one for one in known if name.lower() in one and one not in near]
        raise OptionError(
            saw=f"a layout named {describe_value(name)}",
            needed=f"one of {len(known)}" + (f"; near are {', '.join(near)}" if near else ""),
            do="headwise layouts lists them; register adds one",
        )
    return known[name]


def register(new: Layout) -> Layout:
    """Add a layout of one's own, under its name.

    Raises:
        OptionError: the name is taken, or not in kebab case.
    """
    if new.name in layouts() or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", new.name):
        raise OptionError(
            saw=f"the name {new.name!r}",
            needed="a name in kebab case that no layout has yet",
            do="choose another one",
        )
    _own[new.name] = new
    return new


@lru_cache(maxsize=1)
def published() -> dict[str, tuple[Layout, ...]]:
    """Those of the catalogue, by what its files say of themselves."""
    found: dict[str, tuple[Layout, ...]] = {}
    names: set[str] = set()
    for entry in iter_modules(catalogue.__path__):
        module = import_module(f"{catalogue.__name__}.{entry.name}")
        for one in module.LAYOUTS:
            assert one.name not in names, f"two layouts are named {one.name}"
            names.add(one.name)
        found[(module.__doc__ or "").partition("\n")[0]] = tuple(module.LAYOUTS)
    return found
