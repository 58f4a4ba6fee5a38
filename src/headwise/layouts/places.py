"""Where the modules of a layout stand in a checkpoint, by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from headwise.layouts.layout import Layout

_SLOT = re.compile(r"\{(\w+)\}")
Numbers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Place:
    """One module of attention, or one tensor outside of it.

    Attributes:
        root: what stands before everything that the layout knows, such as "bert.".
        role: of the module; for a tensor outside, the canonical name of what it holds.
        numbers: of the layer, and whatever else is numbered.
    """

    root: str
    role: str
    numbers: Numbers = ()

    def under(self, root: str | None) -> Place:
        """The same place under another root; itself for None."""
        return self if root is None else replace(self, root=root)

    def within(self, template: str) -> str:
        """The name at this place that a layout writes as ``template``."""
        return self.root + template.format(**dict(self.numbers))


@dataclass(frozen=True)
class Module:
    """A module that was found: its place, and full name -> name within the module."""

    place: Place
    prefix: str
    tensors: dict[str, str]
    beside: tuple[str, ...]


def modules_of(layout: Layout, names: Iterable[str]) -> list[Module]:
    """Every module of ``layout`` among the names of a checkpoint, in their order.

    Where none stands at a place that the layout knows, any prefix that all its matrices share is
    one: the module of another model, whose name is kept.
    """
    names = list(names)
    found: dict[tuple[Place, str], tuple[dict[str, str], list[str]]] = {}
    for name in names:
        for role, template in layout.where.items():
            if match := _prefix(template).match(name):
                numbers = tuple((k, v) for k, v in match.groupdict().items() if k != "root")
                place = Place(match["root"], role, numbers)
                own, beside = found.setdefault((place, match[0]), ({}, []))
                local = name[match.end() :]
                if local in layout.tensors:
                    own[name] = local
                else:
                    beside.append(name)
                break
    known = [
        Module(place, prefix, own, tuple(beside))
        for (place, prefix), (own, beside) in found.items()
        if own
    ]
    return known or _anywhere(layout, names)


def _anywhere(layout: Layout, names: list[str]) -> list[Module]:
    found: dict[str, dict[str, str]] = {}
    for name in names:
        for local in layout.tensors:
            if name == local or name.endswith((f".{local}", f"/{local}")):
                found.setdefault(name.removesuffix(local), {})[name] = local
    return [
        Module(Place(prefix, ""), prefix, own, _beside(prefix, own, names))
        for prefix, own in found.items()
        if layout.required <= set(own.values())
    ]


def _beside(prefix: str, own: dict[str, str], names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(prefix) and name not in own)


def outside(layout: Layout, name: str, roots: Iterable[str]) -> tuple[str, Place] | None:
    """The template of a tensor outside of attention, and its place; None where it is not known."""
    for template in layout.outside:
        match = _whole(template).match(name)
        if match and match["root"] in roots:
            numbers = tuple((k, v) for k, v in match.groupdict().items() if k != "root")
            return template, Place(match["root"], template, numbers)
    return None


def slots(template: str) -> set[str]:
    """What is numbered in a template."""
    return set(_SLOT.findall(template))


@cache
def _prefix(template: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<root>(?:.*?[./])?){_numbered(template)}")


@cache
def _whole(template: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<root>(?:.*?[./])?){_numbered(template)}$")


def _numbered(template: str) -> str:
    parts = _SLOT.split(template)
    return "".join(
        rf"(?P<{part}>\d+)" if at % 2 else re.escape(part) for at, part in enumerate(parts)
    )
