"""How two checkpoints are read side by side: what one leaves open, the other's values decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwise.cli.checkpoints import Opened
from headwise.layouts.detect import Candidate, Detection
from headwise.layouts.evidence import by_values
from headwise.layouts.layout import Layout

OPTIONS = ("--first-layout", "--second-layout")
FOUND = ("heads", "kv_heads", "rotary_width")  # out by values, where nobody says them


@dataclass(frozen=True)
class ReadAs:
    """What was decided.

    Attributes:
        layouts: of the first and of the second; None where they cannot be the same.
        known: heads, and what else is said or was found out.
        lines: what has to be said of it: how it was decided, or why they are not the same.
    """

    layouts: tuple[Layout, Layout] | None
    known: dict[str, int]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class _Side:
    """One of the two: its layout, if it is decided without the other."""

    opened: Opened
    detection: Detection
    layout: Layout | None

    def agreeing(self, other: _Side) -> Detection:
        """The candidates that hold what the other does."""
        return by_values(self.detection, self.opened.source, other.detection, other.opened.source)


def read_as(one: Opened, other: Opened, named: tuple[str | None, str | None]) -> ReadAs:
    """Decide it.

    Args:
        one: the first.
        other: the second.
        named: their layouts, as far as they are given.

    Raises:
        OptionError: one holds no attention that is known, or a given layout is contradicted; or it
            stays open.
    """
    apart = [
        f"{name}: {count} in the first's config, {other.known[name]} in the second's"
        for name, count in one.known.items()
        if other.known.get(name, count) != count
    ]
    if apart:
        return ReadAs(None, {}, (*apart, "no tensor was compared"))
    known = one.known | other.known  # one config may stand for both
    sides = [
        _side(opened, name, option, known)
        for opened, name, option in zip((one, other), named, OPTIONS, strict=True)
    ]
    first, second = sides
    if first.layout and second.layout:
        return ReadAs((first.layout, second.layout), known, ())
    for at, side in enumerate(sides):
        if side.layout is None and not all(each.detection.candidates for each in sides):
            side.opened.require_fit(side.detection, **known)
            side.detection.require(file=str(side.opened.source.path), option=OPTIONS[at])
    if first.layout is None:
        return _by_values(first, second, known, is_turned=False)
    return _by_values(second, first, known, is_turned=True)


def _side(opened: Opened, name: str | None, option: str, known: dict[str, int]) -> _Side:
    found = opened.detection(**known)
    if name is None:
        return _Side(opened, found, found.layout)
    given = opened.named(name, option)
    named = [one for one in _all(found) if one.layout == given]
    return _Side(opened, Detection(tuple((one,) for one in named), {}), given)


def _by_values(open_: _Side, other: _Side, known: dict[str, int], *, is_turned: bool) -> ReadAs:
    found = open_.agreeing(other)
    if not found.candidates:
        which = "first" if is_turned else "second"
        several = [
            f"not {one.layout.name}: "
            + found.refuted[one.layout.name].replace("the reference", f"the {which}")
            for one in _all(open_.detection)
        ]
        return ReadAs(None, known, (f"{open_.opened.source.path} may be in several:", *several))
    mine = _likest(found, other.layout)
    theirs = other.layout
    if theirs is None:
        alone = _Side(open_.opened, Detection(((mine,),), {}), mine.layout)
        theirs = _likest(other.agreeing(alone), mine.layout).layout
    sizes = mine.fits[0]
    new = {name: sizes[name] for name in FOUND if name in sizes and name not in known}
    counts = "".join(f", {name} {count}" for name, count in new.items())
    layouts = (theirs, mine.layout) if is_turned else (mine.layout, theirs)
    line = f"read as {layouts[0].name} and {layouts[1].name}{counts}: their values agree so"
    return ReadAs(layouts, known | new, (line,))


def _likest(found: Detection, other: Layout | None) -> Candidate:
    """Of those that agree the one that the other is in, or else that knows the most names."""
    name = None if other is None else other.name
    return min(_all(found), key=lambda one: (one.layout.name != name, -one.around))


def _all(found: Detection) -> Iterator[Candidate]:
    return (one for group in found.candidates for one in group)
