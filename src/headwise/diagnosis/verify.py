"""`verify`: whether two sets of weights are the same function, byte for byte.

Where names and shapes leave the layout of one open, the values of the other decide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from headwise.checkpoints.config import Config
from headwise.diagnosis.candidate_layouts import CandidateLayout
from headwise.diagnosis.compare_tensors import UNREADABLE, compare_tensors, outputs_of_both
from headwise.diagnosis.detect import Counts, Given, GivenWeights, by_values, weights_of
from headwise.diagnosis.detection_result import Detection
from headwise.diagnosis.diagnosis_result import Diagnosis, OutputComparison, Verdict
from headwise.errors import OptionError
from headwise.layouts.layout import Layout
from headwise.support.progress import Progress, no_progress

SIDES = ("first", "second")
FOUND = ("heads", "kv_heads", "rotary_width")  # out by values, where nobody says them
Named = tuple[str | Layout | None, str | Layout | None]


@dataclass(frozen=True)
class LayoutPair:
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

    weights: GivenWeights
    detection: Detection
    layout: Layout | None
    is_apart: bool = False

    @property
    def trials(self) -> list[tuple[Layout, dict[str, int]]]:
        """The layouts in which it may be read, with the most heads that fit."""
        groups = self.detection.candidates or self.detection.damaged
        found = [(group[0].layout, group[0].fits[-1]) for group in groups]
        return found if self.layout is None else [*found, (self.layout, {})][:1]

    @property
    def description(self) -> str:
        """Its layout, with its counts."""
        one = next(_all(self.detection), None)
        if one is None:
            return ""
        sizes = one.fits[0] if len(one.fits) == 1 else {}
        counts = ", ".join(f"{name} {sizes[name]}" for name in FOUND if name in sizes)
        return one.layout.name + (f", with {counts}" if counts else "")

    def faults(self, layout: Layout | None) -> list[str]:
        """What keeps it from being whole in that layout; in any, where none is given."""
        return [
            fault
            for group in self.detection.damaged
            if layout is None or any(one.layout == layout for one in group)
            for fault in group[0].faults
        ]

    def agreeing(self, other: _Side, *, called: str) -> Detection:
        """The candidates that hold what the other does."""
        mine, theirs = self.weights.tensors, other.weights.tensors
        return by_values(self.detection, mine, other.detection, theirs, called=called)


Sides = tuple[_Side, _Side]
Trial = tuple[tuple[Layout, Layout], dict[str, int]]  # layouts, and heads and so on


def readings(one: GivenWeights, other: GivenWeights, named: Named) -> LayoutPair:
    """Decide in which layouts the two are read.

    Where no layout of the one that is open agrees with the other, they are not the same; they are
    then read so that the most tensors are equal. So are two of which one is not whole.

    Raises:
        OptionError: a given layout is contradicted, or counts fit no layout.
        UndecidedError: one holds no attention that is known.
    """
    contradictions = [
        f"{name}: {count} in the first's config, {other.known[name]} in the second's"
        for name, count in one.known.items()
        if other.known.get(name, count) != count
    ]
    if contradictions:
        return LayoutPair(None, {}, tuple(contradictions))
    known = one.known | other.known  # one config may stand for both
    parameters = [f"{which}_layout" for which in SIDES]
    first, second = sides = (
        _side(one, named[0], parameters[0], known),
        _side(other, named[1], parameters[1], known),
    )
    if first.is_apart:  # the first is what is moved: by its own counts
        known = _new(first.trials[0][1], {}) | first.weights.known
    if first.layout and second.layout:
        are_apart = first.is_apart or second.is_apart
        pairs = zip(SIDES, sides, strict=True) if are_apart else ()
        notes = tuple(f"the {which} is {side.description}" for which, side in pairs)
        notes += _faults(sides, (first.layout, second.layout))
        return LayoutPair((first.layout, second.layout), known, notes, can_run=not notes)
    is_damaged = any(side.layout is None and side.faults(None) for side in sides)
    if is_damaged and first.trials and second.trials:
        return _damaged(sides, known)
    for side, parameter in zip(sides, parameters, strict=True):
        if side.layout is None and not all(each.detection.candidates for each in sides):
            side.weights.require_fit(side.detection, **known)
            side.detection.require(file=side.weights.title, parameter=parameter)
    return _by_values(sides, 0 if first.layout is None else 1, known)


def _side(
    weights: GivenWeights, name: str | Layout | None, parameter: str, known: dict[str, int]
) -> _Side:
    found = weights.detection(**known)
    if name is None:
        alone = found if found.candidates or found.damaged else weights.detection()
        is_apart = alone is not found and bool(alone.candidates)
        found = alone if is_apart else found
        return _Side(weights, found, found.layout, is_apart)
    layout = weights.named(name, parameter)
    candidates, damaged = (
        tuple((one,) for group in groups for one in group if one.layout == layout)
        for groups in (found.candidates, found.damaged)
    )
    return _Side(weights, Detection(candidates, {}, damaged=damaged), layout)


def _new(sizes: dict[str, int], known: dict[str, int]) -> dict[str, int]:
    """The counts that a reading finds out."""
    return {name: sizes[name] for name in FOUND if name in sizes and name not in known}


def _damaged(sides: Sides, known: dict[str, int]) -> LayoutPair:
    """The reading of two of which one is not whole: in one layout if it can be."""
    first, second = sides
    pairs = [(one, two) for one in first.trials for two in second.trials]
    pairs = [(one, two) for one, two in pairs if one[0] == two[0]] or pairs
    trials = []
    for (mine, sizes), (theirs, others) in pairs:
        # the counts of the whole one
        both = sizes | others if first.faults(mine) else others | sizes
        trials.append(((mine, theirs), known | _new(both, known)))
    (layouts, counts), _ = _most_equal(sides, trials)
    return LayoutPair(layouts, counts, _faults(sides, layouts), can_run=False)


def _faults(sides: Sides, layouts: tuple[Layout, Layout]) -> tuple[str, ...]:
    """What keeps each side from being whole, in words."""
    return tuple(
        f"the {which} is not whole: {fault}"
        for which, side, layout in zip(SIDES, sides, layouts, strict=True)
        for fault in side.faults(layout)
    )


def _by_values(sides: Sides, at: int, known: dict[str, int]) -> LayoutPair:
    """The reading of two of which the side at ``at`` is open."""
    open_, other = sides[at], sides[1 - at]
    found = open_.agreeing(other, called=f"the {SIDES[1 - at]}")
    if not found.candidates:
        return _nearest(sides, at, found, known)
    mine = _likest(found, other.layout)
    theirs = other.layout
    if theirs is None:
        alone = _Side(open_.weights, Detection(((mine,),), {}), mine.layout)
        theirs = _likest(other.agreeing(alone, called=f"the {SIDES[at]}"), mine.layout).layout
    new = _new(mine.fits[0], known)
    counts = "".join(f", {name} {count}" for name, count in new.items())
    layouts = (mine.layout, theirs) if at == 0 else (theirs, mine.layout)
    line = f"read as {layouts[0].name} and {layouts[1].name}{counts}: their values agree so"
    return LayoutPair(layouts, known | new, (line,))


def _nearest(sides: Sides, at: int, found: Detection, known: dict[str, int]) -> LayoutPair:
    """The reading of weights that agree in none: each tensor is compared all the same."""
    open_, other = sides[at], sides[1 - at]
    theirs = other.layout or _likest(other.detection, None).layout
    trials = []
    for mine in _all(open_.detection):
        layouts = (mine.layout, theirs) if at == 0 else (theirs, mine.layout)
        # the most heads, which name a difference most narrowly
        trials.append((layouts, known | _new(mine.fits[-1], known)))
    (layouts, counts), equal = _most_equal(sides, trials)
    line = f"read as {' and '.join(one.name for one in layouts)}"
    if 2 * equal > max(len(side.weights.tensors) for side in sides):
        line += ", where most tensors are equal"
    lines = (
        f"the {SIDES[at]} may be in {len(trials)} layouts, and in none it holds what the other "
        "does",
        line,
        *(
            f"not {one.layout.name}: {found.refuted[one.layout.name]}"
            for one in _all(open_.detection)
        ),
    )
    return LayoutPair(layouts, counts, lines, can_run=not (open_.is_apart or other.is_apart))


def _most_equal(sides: Sides, trials: list[Trial]) -> tuple[Trial, int]:
    """The layouts in which most tensors are equal, and how many; -1 where none can be read."""
    first, second = (side.weights.tensors for side in sides)
    counts = [-1] * len(trials)
    for number, ((mine, theirs), known) in enumerate(trials):
        with suppress(*UNREADABLE):
            compared = compare_tensors(first, second, mine, theirs, progress=no_progress, **known)
            counts[number] = compared.same
    most = max(counts)
    return trials[counts.index(most)], most


def _likest(found: Detection, other: Layout | None) -> CandidateLayout:
    """Of those that agree the one that the other is in, or else that knows the most names."""
    name = None if other is None else other.name
    return min(_all(found), key=lambda one: (one.layout.name != name, -one.around))


def _all(found: Detection) -> Iterator[CandidateLayout]:
    return (one for group in found.candidates for one in group)


def verify(
    first: Given,
    second: Given,
    *,
    first_layout: str | Layout | None = None,
    second_layout: str | Layout | None = None,
    config: Config | None = None,
    outputs: bool = False,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_width: int | None = None,
    progress: Progress = no_progress,
) -> Diagnosis:
    """Compare two sets of weights, in one layout or in two, byte for byte.

    The first is moved into the layout of the second, tensor by tensor. Where names and shapes leave
    a layout open, the values of the other side decide it. The result is true if both are the same
    function; printed, it says which tensors, projections and heads differ.

    Args:
        first: a file of weights, a folder with them, or a state dict.
        second: likewise.
        first_layout: the layout of the first; None to find it out.
        second_layout: that of the second.
        config: as in config.json, for both; that beside each file if None.
        outputs: run every layer of both in float64 as well.
        heads: query heads, where no config says it.
        kv_heads: heads of keys and values.
        head_dim: channels of a head, in place of ``heads``.
        rotary_width: channels of a head that are rotated.
        progress: told what is compared, and how many of how many steps are done.

    Raises:
        CheckpointError: a path leads to no weights.
        OptionError: a config contradicts what is given, or counts are missing.
        UndecidedError: one of them holds no attention that the catalogue knows.
    """
    _require_types({"first_layout": first_layout, "second_layout": second_layout}, progress)
    counts: Counts = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_width": rotary_width,
    }
    one = weights_of(first, counts, config=config, title="the first state dict")
    other = weights_of(second, counts, config=config, title="the second state dict")
    read = readings(one, other, (first_layout, second_layout))
    return _diagnosis(one, other, read, outputs=outputs, progress=progress)


def _diagnosis(
    one: GivenWeights, other: GivenWeights, read: LayoutPair, *, outputs: bool, progress: Progress
) -> Diagnosis:
    if read.layouts is None:
        return Diagnosis(verdict=Verdict.DIFFERENT, layouts=None, notes=read.lines, tensors=None)
    mine, theirs = read.layouts
    tensors = compare_tensors(
        one.tensors, other.tensors, mine, theirs, progress=progress, **read.known
    )
    ran: list[OutputComparison] = []
    if outputs and read.can_run and not tensors.unheld:
        stated = one.config or other.config
        ran = outputs_of_both(one.tensors, other.tensors, mine, theirs, stated, **read.known)
    is_same = bool(tensors) and all(layer.is_same for layer in ran)
    return Diagnosis(
        verdict=Verdict.SAME if is_same else Verdict.DIFFERENT,
        layouts=read.layouts,
        notes=read.lines,
        tensors=tensors,
        outputs=tuple(ran),
    )


def _require_types(layouts: Mapping[str, object], progress: object) -> None:
    for name, given in layouts.items():
        if given is not None and not isinstance(given, (str, Layout)):
            raise OptionError(
                saw=f"{name} of type {type(given).__name__}",
                needed="the name of a layout, or a Layout",
                do=f'give {name}="llama", or leave it out; headwise layouts lists the names',
            )
    if not callable(progress):
        raise OptionError(
            saw=f"progress of type {type(progress).__name__}",
            needed="a function of what is compared, the steps that are done, and all steps",
            do="give such a function, or leave progress out",
        )
