"""What stands around attention, and where it goes: norms, the MLP, embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from headwise.layouts import moving
from headwise.layouts.layout import Layout
from headwise.layouts.pattern import Pattern, parse
from headwise.layouts.places import Form, Place, outside, slots
from headwise.layouts.sizes import solve
from headwise.layouts.steps import Header, Outside, Step, components, copy

PARTS = ("weight", "kernel", "W", "w", "bias", "b")  # of a linear layer, or of a norm


def around(
    names: Iterable[str],
    source: Layout,
    target: Layout,
    headers: Mapping[str, Header],
    roots: set[str],
    *,
    form: Form,
) -> list[Step]:
    """Steps for what is not attention; what either layout does not know keeps its name.

    So do parts of a module that holds something unknown, such as scales or an adapter: these would
    be lost from their side.
    """
    kept, places = [], dict[Place, dict[str, Pattern]]()
    for name in names:
        found = outside(source, name, roots)
        if found is None:
            kept.append(name)
            continue
        template, place = found
        same = places.setdefault(replace(place, role=""), {})
        same[name] = parse(source.outside[template])
    steps = []
    for place, stored in places.items():
        written = _counterparts(stored.values(), target, {slot for slot, _ in place.numbers})
        for inputs, templates in components(stored, written):
            if any(_has_more(name, kept) for name in inputs):
                kept += inputs
                continue
            held = {name: stored[name] for name in inputs}
            made = {place.formed(form).within(name): written[name] for name in templates}
            if not _is_all(held, made):
                kept += inputs
                continue
            steps += _moved(held, made, headers)
    return steps + [copy(name, _under(form.root, name, roots), headers[name]) for name in kept]


def _has_more(name: str, kept: Iterable[str]) -> bool:
    """Whether its module holds more that keeps its name: scales, an adapter, or a bias."""
    module, _, leaf = name.rpartition(".")
    return leaf in PARTS and any(other.startswith(module + ".") for other in kept)


def _under(root: str | None, name: str, roots: Iterable[str]) -> str:
    """A name under another root, if it stands under one."""
    above = [old for old in roots if name.startswith(old)]
    return name if root is None or not above else root + name.removeprefix(max(above, key=len))


def _is_all(held: Mapping[str, Pattern], made: Mapping[str, Pattern]) -> bool:
    """Whether the target holds all that is in these tensors of the source."""
    mine, theirs = (
        {tensor for pattern in some.values() for tensor in pattern.tensors} for some in (held, made)
    )
    return mine == theirs


def _counterparts(
    stored: Iterable[Pattern], target: Layout, numbered: set[str]
) -> dict[str, Pattern]:
    """The tensors of the target that can be made of these: template -> pattern, each thing once."""
    held = {tensor for pattern in stored for tensor in pattern.tensors}
    found: dict[str, Pattern] = {}
    for template, text in target.outside.items():
        pattern = parse(text)
        if held.issuperset(pattern.tensors) and slots(template) == numbered:
            held -= set(pattern.tensors)
            found[template] = pattern
    return found


def _moved(
    held: Mapping[str, Pattern], made: Mapping[str, Pattern], headers: Mapping[str, Header]
) -> list[Step]:
    """The step between tensors of one content."""
    if list(held.values()) == list(made.values()):
        return [copy(name, new, headers[name]) for name, new in zip(held, made, strict=True)]
    shapes = {name: (pattern, tuple(headers[name].shape)) for name, pattern in held.items()}
    sizes = solve(shapes, {}, {})
    moving.require_one_dtype({name: headers[name].dtype for name in held})
    outputs = {name: pattern.shape(sizes) for name, pattern in made.items()}
    return [Step(tuple(held), outputs, Outside(held, sizes), Outside(made, sizes))]
