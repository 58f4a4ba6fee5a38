"""The layouts of two sets of weights: what one leaves open, the values of the other decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from headwise.checkpoints.detect import Candidate, Detection
from headwise.checkpoints.evidence import by_values
from headwise.checkpoints.verify import verify
from headwise.diagnosis.weights import Weights
from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.layouts.layout import Layout

OPTIONS = ("--first-layout", "--second-layout")
FOUND = ("heads", "kv_heads", "rotary_width")  # out by values, where nobody says them
Named = tuple[str | Layout | None, str | Layout | None]


@dataclass(frozen=True)
class Readings:
    """The layouts in which two sets of weights are read.

    Attributes:
        layouts: of the first and of the second; None where their configs contradict each other.
        known: heads, and what else is said or was found out.
        lines: how the layouts were decided, or why the two are not the same.
    """

    layouts: tuple[Layout, Layout] | None
    known: dict[str, int]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class _Side:
    """One of the two: its layout, if it is decided without the other."""

    weights: Weights
    detection: Detection
    layout: Layout | None

    def agreeing(self, other: _Side) -> Detection:
        """The candidates that hold what the other does."""
        mine, theirs = self.weights.tensors, other.weights.tensors
        return by_values(self.detection, mine, other.detection, theirs)


def readings(one: Weights, other: Weights, named: Named) -> Readings:
    """Decide in which layouts the two are read.

    Where no layout of the one that is open agrees with the other, they are not the same; they are
    then read so that the most tensors are equal.

    Args:
        one: the first.
        other: the second.
        named: their layouts, as far as they are given.

    Raises:
        OptionError: a given layout is contradicted, or counts fit no layout.
        UndecidedError: one holds no attention that is known.
    """
    apart = [
        f"{name}: {count} in the first's config, {other.known[name]} in the second's"
        for name, count in one.known.items()
        if other.known.get(name, count) != count
    ]
    if apart:
        return Readings(None, {}, tuple(apart))
    known = one.known | other.known  # one config may stand for both
    sides = [
        _side(weights, name, option, known)
        for weights, name, option in zip((one, other), named, OPTIONS, strict=True)
    ]
    first, second = sides
    if first.layout and second.layout:
        return Readings((first.layout, second.layout), known, ())
    for at, side in enumerate(sides):
        if side.layout is None and not all(each.detection.candidates for each in sides):
            side.weights.require_fit(side.detection, **known)
            side.detection.require(file=side.weights.title, option=OPTIONS[at])
    if first.layout is None:
        return _by_values(first, second, known, is_turned=False)
    return _by_values(second, first, known, is_turned=True)


def _side(weights: Weights, name: str | Layout | None, option: str, known: dict[str, int]) -> _Side:
    found = weights.detection(**known)
    if name is None:
        return _Side(weights, found, found.layout)
    given = weights.named(name, option)
    named = [one for one in _all(found) if one.layout == given]
    return _Side(weights, Detection(tuple((one,) for one in named), {}), given)


def _by_values(open_: _Side, other: _Side, known: dict[str, int], *, is_turned: bool) -> Readings:
    found = open_.agreeing(other)
    if not found.candidates:
        return _nearest(open_, other, found, known, is_turned=is_turned)
    mine = _likest(found, other.layout)
    theirs = other.layout
    if theirs is None:
        alone = _Side(open_.weights, Detection(((mine,),), {}), mine.layout)
        theirs = _likest(other.agreeing(alone), mine.layout).layout
    sizes = mine.fits[0]
    new = {name: sizes[name] for name in FOUND if name in sizes and name not in known}
    counts = "".join(f", {name} {count}" for name, count in new.items())
    layouts = (theirs, mine.layout) if is_turned else (mine.layout, theirs)
    line = f"read as {layouts[0].name} and {layouts[1].name}{counts}: their values agree so"
    return Readings(layouts, known | new, (line,))


def _nearest(
    open_: _Side, other: _Side, found: Detection, known: dict[str, int], *, is_turned: bool
) -> Readings:
    """The reading of weights that agree in none: each tensor is compared all the same."""
    which, reference = ("second", "the first") if is_turned else ("first", "the second")
    names = [one.layout.name for one in _all(open_.detection)]
    reasons = [
        f"not {name}: " + found.refuted[name].replace("the reference", reference) for name in names
    ]
    theirs = other.layout or _likest(other.detection, None).layout
    trials = []
    for mine in _all(open_.detection):
        sizes = mine.fits[-1]  # the most heads, which name a difference most narrowly
        new = {name: sizes[name] for name in FOUND if name in sizes and name not in known}
        layouts = (theirs, mine.layout) if is_turned else (mine.layout, theirs)
        trials.append(Readings(layouts, known | new, ()))
    sides = (other.weights, open_.weights) if is_turned else (open_.weights, other.weights)
    best = max(trials, key=lambda trial: _count_equal(sides, trial))
    assert best.layouts is not None
    several = (
        f"the {which} may be in {len(names)} layouts, and in none it holds what the other does"
    )
    line = f"read as {' and '.join(one.name for one in best.layouts)}, where most tensors are equal"
    return replace(best, lines=(several, line, *reasons))


def _count_equal(sides: tuple[Weights, Weights], trial: Readings) -> int:
    """How many tensors are equal in this reading; -1 where it cannot be made."""
    assert trial.layouts is not None
    with suppress(OptionError, ShapeError, DTypeError):
        (first, second), (mine, theirs) = (side.tensors for side in sides), trial.layouts
        return verify(first, second, mine, theirs, progress=None, **trial.known).same
    return -1


def _likest(found: Detection, other: Layout | None) -> Candidate:
    """Of those that agree the one that the other is in, or else that knows the most names."""
    name = None if other is None else other.name
    return min(_all(found), key=lambda one: (one.layout.name != name, -one.around))


def _all(found: Detection) -> Iterator[Candidate]:
    return (one for group in found.candidates for one in group)
