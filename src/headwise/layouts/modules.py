"""Positions of a layout's modules in a checkpoint, by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache

from headwise.layouts._layout import SLOT, Layout

BASES = ("model.", "gpt_neox.")
_DELIMITED_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?=[./])")
Numbers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class NameForm:
    """Form of the names in a target; None keeps the form of the source."""

    root: str | None = None  # what is before all of them, such as "bert."
    # whether they lack the word that models with a head call their base by
    base: bool | None = None

    @classmethod
    def shared_by(cls, modules: Iterable[NamedModule]) -> NameForm:
        places = [module.place for module in modules]
        roots = {place.root for place in places}
        bases = {place.is_base for place in places if place.role}
        return cls(
            root=roots.pop() if len(roots) == 1 else None,
            base=bases.pop() if len(bases) == 1 else None,
        )


AS_STORED = NameForm()


@dataclass(frozen=True)
class NamedPosition:
    """Position of an attention module, or of a tensor outside of attention."""

    root: str  # what stands before everything that the layout knows, such as "bert."
    role: str  # of the module; for a tensor outside, the canonical name of what it holds
    numbers: Numbers = ()  # of the layer, and whatever else is numbered
    # whether its model was stored without its head, and so without its base's name
    is_base: bool = False

    def in_name_form(self, form: NameForm) -> NamedPosition:
        root = self.root if form.root is None else form.root
        return replace(self, root=root, is_base=self.is_base if form.base is None else form.base)

    def fill_name_template(self, template: str) -> str:
        written = (self.is_base and _remove_base_prefix(template)) or template
        return self.root + written.format(**dict(self.numbers))


@dataclass(frozen=True)
class NamedModule:
    """Module in a checkpoint: its position, and full name -> name within the module."""

    place: NamedPosition
    prefix: str
    tensors: dict[str, str]
    beside: tuple[str, ...]

    @property
    def layer(self) -> int:
        """Number of the layer in the model, by name; some layers may hold no attention."""
        counted = (part for part in re.split("[./]", self.prefix) if part.isdecimal())
        return int(dict(self.place.numbers).get("layer") or next(counted, 0))

    @property
    def stack(self) -> str | None:
        """The part of the prefix before the layer's number; None where the layout has no layers."""
        if [name for name, _ in self.place.numbers] != ["layer"]:
            return None
        number = _DELIMITED_NUMBER.search(self.prefix, len(self.place.root))
        return number and self.prefix[: number.start()]


def find_modules(layout: Layout, names: Iterable[str]) -> list[NamedModule]:
    """Return every module of ``layout`` in a checkpoint, in the order of their numbers.

    Beside those at the places that the layout knows, any prefix that all its matrices share is
    one: the module of another model, or of another part, whose name is kept. Among them are those
    that hold none of the layout's tensors, or not all of them, where others do: quantised ones, or
    mixed layouts. A base model is stored without the word that models with a head call it by.
    """
    names = list(names)
    modules = _find_modules_by_templates(layout.where, layout, names)
    if not any(module.tensors for module in modules):
        # Those of a model that was stored without its head: its names lack their first word.
        bare = {role: _remove_base_prefix(place) for role, place in layout.where.items()}
        where = {role: place for role, place in bare.items() if place}
        modules = _find_modules_by_templates(where, layout, names, is_base=True)
        whole = (module for module in modules if layout.required <= {*module.tensors.values()})
        roots = {module.place.root for module in whole}
        modules = [module for module in modules if module.place.root in roots]
    # A block that stores attention directly, beside other tensors, is no module without its own.
    blocks = {role for role, place in layout.where.items() if place.endswith("{layer}.")}
    placed = [
        module
        for module in modules
        if module.tensors
        or (module.place.role not in blocks and find_unlisted_tensors_of_module(module, layout))
    ]
    used = {name for module in placed for name in (*module.tensors, *module.beside)}
    elsewhere = _find_modules_elsewhere(layout, [name for name in names if name not in used])
    return sorted(placed + elsewhere, key=_module_sort_key)


def _find_modules_by_templates(
    where: Mapping[str, str], layout: Layout, names: Iterable[str], *, is_base: bool = False
) -> list[NamedModule]:
    modules: dict[tuple[NamedPosition, str], tuple[dict[str, str], list[str]]] = {}
    stored = {_with_dots(local): local for local in layout.tensors}
    for name in names:
        for role, template in where.items():
            if match := _template_regex(template).match(name):
                place = NamedPosition(match["root"], role, _slot_numbers(match), is_base)
                tensors, beside = modules.setdefault((place, match[0]), ({}, []))
                local = stored.get(_with_dots(name[match.end() :]))
                if local is not None:
                    tensors[name] = local
                else:
                    beside.append(name)
                break
    return [
        NamedModule(place, prefix, tensors, tuple(beside))
        for (place, prefix), (tensors, beside) in modules.items()
    ]


def _remove_base_prefix(template: str) -> str:
    base = next((base for base in BASES if template.startswith(base)), None)
    return "" if base is None else template.removeprefix(base)


def _module_sort_key(module: NamedModule) -> tuple[str, bool, list[tuple[int, str]]]:
    """Return a sort key: layer 10 follows layer 2, and a decoder follows its encoder."""
    place, parts = module.place, re.split(r"(\d+)", module.prefix)
    counted = [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
    return (place.root if place.role else "", place.role == "decoder", counted)


def find_unlisted_tensors_of_module(module: NamedModule, layout: Layout) -> list[str]:
    return [
        name
        for name in module.beside
        if not any(
            fnmatchcase(_with_dots(name.removeprefix(module.prefix)), _with_dots(known))
            for known in layout.beside
        )
        and locate_weight_outside_attention(layout, name, [module.place.root]) is None
    ]


def may_be_of_layout(module: NamedModule, layout: Layout) -> bool:
    """True if a layout has all tensors of a module, and the module the layout's marks."""
    marks = {module.prefix + mark for mark in layout.marks}
    return marks.issubset(module.beside) and not find_unlisted_tensors_of_module(module, layout)


def _find_modules_elsewhere(layout: Layout, names: list[str]) -> list[NamedModule]:
    modules: dict[str, dict[str, str]] = {}
    stored = {f".{_with_dots(local)}": local for local in layout.tensors}
    for name in names:
        dotted = f".{_with_dots(name)}"
        for ending, local in stored.items():
            if dotted.endswith(ending):
                modules.setdefault(name[: len(name) - len(local)], {})[name] = local
    whole = {
        replace_numbers_with_layer_slots(prefix)
        for prefix, tensors in modules.items()
        if layout.required <= {*tensors.values()}
    }
    elsewhere = []
    for prefix, tensors in modules.items():
        if replace_numbers_with_layer_slots(prefix) in whole:
            beside = (name for name in names if name.startswith(prefix) and name not in tensors)
            place = NamedPosition(prefix, "")
            elsewhere.append(NamedModule(place, prefix, tensors, tuple(beside)))
    return elsewhere


def _with_dots(name: str) -> str:
    """Return the name of a tree flattened with dots; some are flattened with slashes."""
    return name.replace("/", ".")


def replace_numbers_with_layer_slots(prefix: str) -> str:
    return re.sub(r"\d+", "{layer}", prefix)


def locate_weight_outside_attention(
    layout: Layout, name: str, roots: Iterable[str]
) -> tuple[str, NamedPosition] | None:
    """Return the template and position of a tensor outside of attention; None if not listed."""
    for is_base in (False, True):
        for template in layout.outside:
            read = _remove_base_prefix(template) if is_base else template
            match = _template_regex(read, end="$").match(name) if read else None
            if match and match["root"] in {*roots, ""}:  # an unembedding has no root
                return template, NamedPosition(
                    match["root"], template, _slot_numbers(match), is_base
                )
    return None


def _slot_numbers(match: re.Match[str]) -> Numbers:
    return tuple((name, number) for name, number in match.groupdict().items() if name != "root")


@cache
def _template_regex(template: str, *, end: str = "") -> re.Pattern[str]:
    parts = [
        rf"(?P<{part}>\d+)" if at % 2 else re.sub(r"/|\\\.", "[./]", re.escape(part))
        for at, part in enumerate(SLOT.split(template))
    ]
    return re.compile(rf"(?P<root>(?:.*?[./])?){''.join(parts)}{end}")
