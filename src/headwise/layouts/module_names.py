"""Where the modules of a layout stand in a checkpoint, by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache

from headwise.layouts.layout import SLOT, Layout

BASES = ("model.", "gpt_neox.")
Numbers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class NameForm:
    """How the names of a target stand; None is as in the source.

    Attributes:
        root: what is before all of them, such as "bert.".
        base: whether they lack the word that models with a head call their base by.
    """

    root: str | None = None
    base: bool | None = None

    @classmethod
    def of(cls, modules: Iterable[NamedModule]) -> NameForm:
        """What the places of all of them have alike."""
        places = [module.place for module in modules]
        roots = {one.root for one in places}
        bases = {one.is_base for one in places if one.role}
        return cls(
            root=roots.pop() if len(roots) == 1 else None,
            base=bases.pop() if len(bases) == 1 else None,
        )


AS_STORED = NameForm()


@dataclass(frozen=True)
class NamePlace:
    """One module of attention, or one tensor outside of it.

    Attributes:
        root: what stands before everything that the layout knows, such as "bert.".
        role: of the module; for a tensor outside, the canonical name of what it holds.
        numbers: of the layer, and whatever else is numbered.
        is_base: whether its model was stored without its head, and so without its base's name.
    """

    root: str
    role: str
    numbers: Numbers = ()
    is_base: bool = False

    def formed(self, form: NameForm) -> NamePlace:
        """The same place in names of another form."""
        root = self.root if form.root is None else form.root
        return replace(self, root=root, is_base=self.is_base if form.base is None else form.base)

    def within(self, template: str) -> str:
        """The name at this place that a layout writes as ``template``."""
        written = (self.is_base and _bare(template)) or template
        return self.root + written.format(**dict(self.numbers))


@dataclass(frozen=True)
class NamedModule:
    """A module that was found: its place, and full name -> name within the module."""

    place: NamePlace
    prefix: str
    tensors: dict[str, str]
    beside: tuple[str, ...]

    @property
    def layer(self) -> int:
        """Which layer of the model it is in, by its name: others may hold no attention at all."""
        counted = (part for part in re.split("[./]", self.prefix) if part.isdecimal())
        return int(dict(self.place.numbers).get("layer") or next(counted, 0))


def modules_of(layout: Layout, names: Iterable[str]) -> list[NamedModule]:
    """Every module of ``layout`` among the names of a checkpoint, in the order of their numbers.

    Beside those at the places that the layout knows, any prefix that all its matrices share is
    one: the module of another model, or of another part, whose name is kept. Among them are those
    that hold none of the layout's tensors, or not all of them, where others do: quantised ones, or
    mixed layouts. A base model is stored without the word that models with a head call it by.
    """
    names = list(names)
    modules = _at(layout.where, layout, names)
    if not any(module.tensors for module in modules):
        # Those of a model that was stored without its head: its names lack their first word.
        where = {role: bare for role, place in layout.where.items() if (bare := _bare(place))}
        modules = _at(where, layout, names, is_base=True)
        whole = (one for one in modules if layout.required <= {*one.tensors.values()})
        roots = {one.place.root for one in whole}
        modules = [module for module in modules if module.place.root in roots]
    placed = [one for one in modules if one.tensors or _is_attention(one, layout)]
    taken = {name for one in placed for name in (*one.tensors, *one.beside)}
    elsewhere = _anywhere(layout, [name for name in names if name not in taken])
    return sorted(placed + elsewhere, key=_order)


def _at(
    where: Mapping[str, str], layout: Layout, names: Iterable[str], *, is_base: bool = False
) -> list[NamedModule]:
    found: dict[tuple[NamePlace, str], tuple[dict[str, str], list[str]]] = {}
    for name in names:
        for role, template in where.items():
            if match := _pattern(template).match(name):
                place = NamePlace(match["root"], role, _numbers(match), is_base)
                own, beside = found.setdefault((place, match[0]), ({}, []))
                local = name[match.end() :]
                if local in layout.tensors:
                    own[name] = local
                else:
                    beside.append(name)
                break
    return [
        NamedModule(place, prefix, own, tuple(beside))
        for (place, prefix), (own, beside) in found.items()
    ]


def _bare(template: str) -> str:
    """Less the name that a model with a head has for its base; "" where there is none."""
    base = next((base for base in BASES if template.startswith(base)), None)
    return "" if base is None else template.removeprefix(base)


def _order(module: NamedModule) -> tuple[str, bool, list[tuple[int, str]]]:
    """Layer 10 behind layer 2, whatever the file's order is, and a decoder behind its encoder."""
    place, parts = module.place, re.split(r"(\d+)", module.prefix)
    counted = [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
    return (place.root if place.role else "", place.role == "decoder", counted)


def _is_attention(module: NamedModule, layout: Layout) -> bool:
    """Whether what stands where attention does is attention, in names that the layout has not.

    Where a layout puts it straight into the block, it may be anything else of the block.
    """
    is_block = layout.where[module.place.role].endswith("{layer}.")
    return not is_block and bool(strays(module, layout))


def strays(module: NamedModule, layout: Layout) -> list[str]:
    """What stands within a module, and is neither of the layout nor known beside it."""
    return [
        name
        for name in module.beside
        if not any(fnmatchcase(name.removeprefix(module.prefix), known) for known in layout.beside)
        and outside(layout, name, [module.place.root]) is None
    ]


def _anywhere(layout: Layout, names: list[str]) -> list[NamedModule]:
    found: dict[str, dict[str, str]] = {}
    for name in names:
        for local in layout.tensors:
            if name == local or name.endswith((f".{local}", f"/{local}")):
                found.setdefault(name.removesuffix(local), {})[name] = local
    whole = {kind_of(prefix) for prefix, own in found.items() if layout.required <= {*own.values()}}
    return [
        NamedModule(
            NamePlace(prefix, ""),
            prefix,
            own,
            tuple(name for name in names if name.startswith(prefix) and name not in own),
        )
        for prefix, own in found.items()
        if kind_of(prefix) in whole
    ]


def kind_of(prefix: str) -> str:
    """The same for the modules of all layers: one that is not whole is missed where others are."""
    return re.sub(r"\d+", "{layer}", prefix)


def outside(layout: Layout, name: str, roots: Iterable[str]) -> tuple[str, NamePlace] | None:
    """The template of a tensor outside of attention, and its place; None where it is not known."""
    for is_base in (False, True):
        for template in layout.outside:
            read = _bare(template) if is_base else template
            match = _pattern(read, end="$").match(name) if read else None
            if match and match["root"] in {*roots, ""}:  # an unembedding stands under no root
                return template, NamePlace(match["root"], template, _numbers(match), is_base)
    return None


def _numbers(match: re.Match[str]) -> Numbers:
    return tuple((name, number) for name, number in match.groupdict().items() if name != "root")


def slots(template: str) -> set[str]:
    """What is numbered in a template."""
    return set(SLOT.findall(template))


@cache
def _pattern(template: str, *, end: str = "") -> re.Pattern[str]:
    parts = [
        rf"(?P<{part}>\d+)" if at % 2 else re.escape(part)
        for at, part in enumerate(SLOT.split(template))
    ]
    return re.compile(rf"(?P<root>(?:.*?[./])?){''.join(parts)}{end}")
