"""The layouts of two sets of weights: what one leaves open, the values of the other decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from headwise.checkpoints.candidates import Candidate
from headwise.checkpoints.detect import Detection
from headwise.checkpoints.evidence import by_values
from headwise.checkpoints.verify import verify
from headwise.diagnosis.weights import Weights
from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.layouts.layout import Layout

PARAMETERS = ("first_layout", "second_layout")
FOUND = ("heads", "kv_heads", "rotary_width")  # out by values, where nobody says them
Named = tuple[str | Layout | None, str | Layout | None]


@dataclass(frozen=True)
class Readings:
    """The layouts in which two sets of weights are read.

    Attributes:
        layouts: of the first and of the second; None where their configs contradict each other.
        known: heads, and what else is said or was found out.
        lines: how the layouts were decided, or why the two are not the same.
        can_run: whether the layers of both can be run.
    """

    layouts: tuple[Layout, Layout] | None
    known: dict[str, int]
    lines: tuple[str, ...]
    can_run: bool = True


@dataclass(frozen=True)
class _Side:
    """One of the two: its layout, if it is decided without the other.

    ``is_apart``: whether the counts of the other fit none of its layouts, and its own do.
    """

    weights: Weights
    detection: Detection
    layout: Layout | None
    is_apart: bool = False

    @property
    def is_damaged(self) -> bool:
        """Whether some modules are whole and others are not, in layouts that nobody named."""
        return self.layout is None and bool(self.detection.damaged)

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
        CheckpointError: some modules of both are not whole.
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
        _side(weights, name, parameter, known)
        for weights, name, parameter in zip((one, other), named, PARAMETERS, strict=True)
    ]
    first, second = sides
    if first.is_apart:  # the first is what is moved: by its own counts
        known = {name: n for name, n in _trials(first)[0][1].items() if name in FOUND}
        known |= first.weights.known
    if first.layout and second.layout:
        notes = _apart(first, second)
        return Readings((first.layout, second.layout), known, notes, can_run=not notes)
    if first.is_damaged != second.is_damaged and all(map(_trials, sides)):
        return _damaged(first, second, known)
    for at, side in enumerate(sides):
        if side.layout is None and not all(each.detection.candidates for each in sides):
            side.weights.require_fit(side.detection, **known)
            side.detection.require(file=side.weights.title, parameter=PARAMETERS[at])
    if first.layout is None:
        return _by_values(first, second, known, is_turned=False)
    return _by_values(second, first, known, is_turned=True)


def _side(
    weights: Weights, name: str | Layout | None, parameter: str, known: dict[str, int]
) -> _Side:
    found = weights.detection(**known)
    if name is None:
        alone = found if found.candidates or found.damaged else weights.detection()
        is_apart = alone is not found and bool(alone.candidates)
        found = alone if is_apart else found
        return _Side(weights, found, found.layout, is_apart)
    given = weights.named(name, parameter)
    named = [one for one in _all(found) if one.layout == given]
    return _Side(weights, Detection(tuple((one,) for one in named), {}), given)


def _apart(first: _Side, second: _Side) -> tuple[str, ...]:
    """What each of the two is, where the counts of one do not fit the other."""
    if not (first.is_apart or second.is_apart):
        return ()
    lines = []
    for which, side in (("first", first), ("second", second)):
        one = next(_all(side.detection), None)
        sizes = {} if one is None or len(one.fits) > 1 else one.fits[0]
        counts = ", ".join(f"{name} {sizes[name]}" for name in FOUND if name in sizes)
        name = one.layout.name if one is not None else ""
        lines.append(f"the {which} is {name}" + (f", with {counts}" if counts else ""))
    return tuple(lines)


def _trials(side: _Side) -> list[tuple[Layout, dict[str, int]]]:
    """The layouts in which a side may be read, with the most heads that fit."""
    if side.layout is not None:
        return [(side.layout, one.fits[-1]) for one in _all(side.detection)][:1] or [
            (side.layout, {})
        ]
    groups = side.detection.candidates or side.detection.damaged
    return [(group[0].layout, group[0].fits[-1]) for group in groups]


def _damaged(first: _Side, second: _Side, known: dict[str, int]) -> Readings:
    """The reading of two of which one is not whole: in one layout if it can be."""
    pairs = [(one, two) for one in _trials(first) for two in _trials(second)]
    pairs = [(one, two) for one, two in pairs if one[0] == two[0]] or pairs
    which, side = ("first", first) if first.is_damaged else ("second", second)
    trials = []
    for (mine, sizes), (theirs, others) in pairs:
        both = others | sizes if side is second else sizes | others  # those of the whole one
        new = {name: both[name] for name in FOUND if name in both and name not in known}
        trials.append(Readings((mine, theirs), known | new, (), can_run=False))
    best = trials[0]
    if len(trials) > 1:
        sides = (first.weights, second.weights)
        best = max(trials, key=lambda trial: _count_equal(sides, trial))
    faults = [
        fault
        for group in side.detection.damaged
        if best.layouts is not None and any(one.layout in best.layouts for one in group)
        for fault in group[0].faults
    ]
    return replace(best, lines=tuple(f"the {which} is not whole: {fault}" for fault in faults))


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
    is_most = 2 * _count_equal(sides, best) > max(len(side.tensors) for side in sides)
    several = (
        f"the {which} may be in {len(names)} layouts, and in none it holds what the other does"
    )
    line = f"read as {' and '.join(one.name for one in best.layouts)}"
    line += ", where most tensors are equal" if is_most else ""
    is_apart = open_.is_apart or other.is_apart
    return replace(best, lines=(several, line, *reasons), can_run=not is_apart)


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
