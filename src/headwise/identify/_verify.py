"""`verify`: byte-for-byte comparison of two sets of weights.

Where names and shapes fit several layouts or numbers of heads, the weights are read in each. The
answer is theirs if they agree: equal values do not show which of them is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

from headwise.checkpoints.description import COUNTS
from headwise.checkpoints.fields import Config
from headwise.errors import OptionError
from headwise.function.weights import AXES
from headwise.identify import detection as detecting
from headwise.identify import results, tensors
from headwise.identify.candidates import CandidateLayout, query_and_kv_head_counts
from headwise.identify.detection import Detection, Given, GivenWeights, open_weights
from headwise.identify.results import Diagnosis, Verdict
from headwise.layouts import equality, modules, registry
from headwise.layouts._layout import Layout
from headwise.scanning.labels import describe_cuts
from headwise.support.arguments import RENAMED_COUNTS, explain_arguments
from headwise.support.progress import Progress, no_progress

SIDES = ("first", "second")
NAMED = 4  # layouts, or counts, of one result
COUNTED = ("heads", "kv_heads", "rotary_width")  # that shapes may leave open
LayoutNames = tuple[str | Layout | None, str | Layout | None]


@dataclass(frozen=True)
class _Side:
    """One of the two sets of weights.

    ``layout`` is None if nothing decides it. ``has_other_counts`` is True if the weights fit a
    layout with their own counts and none with the counts of both.
    """

    weights: GivenWeights
    detection: Detection
    layout: Layout | None
    has_other_counts: bool = False

    @property
    def candidates(self) -> list[CandidateLayout]:
        groups = self.detection.fitting or self.detection.damaged
        return [group[0] for group in groups][: 1 if self.layout else None]

    @property
    def description(self) -> str:
        candidate = next(iter(self.candidates), None)
        if candidate is None:
            return ""
        sizes = candidate.fits[0] if len(candidate.fits) == 1 else {}
        counts = ", ".join(f"{name} {sizes[name]}" for name in COUNTED if name in sizes)
        return candidate.layout.name + (f", with {counts}" if counts else "")

    def faults(self, layout: Layout) -> list[str]:
        return [
            fault
            for group in self.detection.damaged
            if any(candidate.layout == layout for candidate in group)
            for fault in group[0].faults
        ]


Sides = tuple[_Side, _Side]


@dataclass(frozen=True)
class _Reading:
    """Layouts and counts in which both sets are read."""

    layouts: tuple[Layout, Layout]
    # Heads, and other counts: of the configs, of the caller, or some that fit.
    counts: dict[str, int]
    pair: tuple[CandidateLayout, ...] = ()  # of these layouts, with sizes that fit, where they do
    # The counts that nothing states, each with the values of the same effect.
    effects: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lines: tuple[str, ...] = ()  # the evidence for these layouts
    can_run: bool = True  # the layers of both can be run
    is_decided: bool = True  # False if other layouts or counts that fit make the weights different

    @property
    def names_heads(self) -> bool:
        return "heads" not in self.effects

    def find_difference(self, sides: Sides, at: int) -> str | None:
        mine, theirs = self.pair[at], self.pair[1 - at]
        states = sides[at].weights.tensors, sides[1 - at].weights.tensors
        called = f"the {SIDES[1 - at]}"
        return detecting.describe_difference_from_reference(
            mine, states[0], theirs, states[1], called, names_heads=self.names_heads
        )

    def is_same(self, sides: Sides) -> bool:
        """True if all tensors are equal, those outside of attention too."""
        first, second = (side.weights.tensors for side in sides)
        with suppress(*tensors.UNREADABLE):
            mine, theirs = self.layouts
            options: dict[str, Any] = {"names_heads": False, **self.counts}
            return bool(tensors.compare_tensors(first, second, mine, theirs, **options))
        return False

    def count_differing_tensors(self, sides: Sides) -> int:
        if not all(candidate.modules for candidate in self.pair):
            return len(AXES)
        first, second = (
            detecting.read_canonical_state(candidate, 0, side.weights.tensors)
            for candidate, side in zip(self.pair, sides, strict=True)
        )
        return len(equality.list_differing_tensors(first, second))


def _list_readings(sides: Sides, known: Mapping[str, int]) -> list[_Reading]:
    """Return the layouts and counts that fit both sets, each effect once; likeliest first.

    If no counts fit both, those of each side are paired: then only the first is converted.
    """
    split = [[_split_by_sizes(each) for each in side.candidates] for side in sides]
    fits = [[each.fits[0] for each in tried] for candidates in split for tried in candidates]
    open_counts = [n for n in COUNTED if any(len({fit.get(n) for fit in f}) > 1 for f in fits)]
    firsts, seconds = ([*chain.from_iterable(candidates)] for candidates in split)
    by_heads: dict[tuple[int, int], list[CandidateLayout]] = {}
    for theirs in seconds:
        by_heads.setdefault(query_and_kv_head_counts(theirs.fits[0]), []).append(theirs)
    pairs = [
        (mine, theirs)
        for mine in firsts
        for theirs in by_heads.get(query_and_kv_head_counts(mine.fits[0]), ())
        if len({each.fits[0].get("rotary_width") for each in (mine, theirs)} - {None}) < 2
    ]
    readings: dict[object, _Reading] = {}
    for mine, theirs in pairs or product(firsts, seconds):
        first, second = mine.fits[0], theirs.fits[0]
        sizes = first | second if mine.faults else second | first  # those of the whole side
        counts = {name: sizes[name] for name in open_counts if name in sizes}
        names = mine.layout.name, theirs.layout.name
        key = _effect_of_conversion(mine, theirs) if pairs else names
        made = _Reading((mine.layout, theirs.layout), counts | {**known}, (mine, theirs))
        reading = readings.setdefault(key, made)
        for name, count in counts.items():
            reading.effects[name] = tuple(sorted({*reading.effects.get(name, ()), count}))
    return sorted(
        readings.values(),
        key=lambda each: (each.layouts[0] != each.layouts[1], -sum(c.around for c in each.pair)),
    )


def _split_by_sizes(candidate: CandidateLayout) -> list[CandidateLayout]:
    """Return a candidate for each of its sizes; with open heads, for the usual widths alone."""
    split = detecting.split_candidate_by_sizes(candidate)
    if len(candidate.fits) == 1:
        return split
    usual = []
    for each in split:
        head_dim = each.fits[0]["head_dim"]
        width = each.fits[0].get("rotary_width", head_dim)
        if width in (head_dim, head_dim // 2, head_dim // 4):
            usual.append(each)
    return usual


def _effect_of_conversion(mine: CandidateLayout, theirs: CandidateLayout) -> object:
    """Return a key that is equal for counts with which the same rows move to the same places."""
    names = mine.layout.name, theirs.layout.name
    if mine.layout == theirs.layout:
        return names
    first, second = (each.layout_reading(each.fits[0]) for each in (mine, theirs))
    with suppress(*tensors.UNREADABLE):
        return names, first.number_entries_converted_to(second)
    return names, tuple(first.sizes.items())


def _choose_reading(sides: Sides, readings: list[_Reading]) -> _Reading:
    """Choose the reading that shows the verdict; undecided if verdicts differ."""
    at = 0 if sides[0].layout is None else 1
    likeliest = readings[0]
    has_one_layout = likeliest.layouts[0] == likeliest.layouts[1]
    if has_one_layout and likeliest.find_difference(sides, at) is None:
        readings = [likeliest]
    why = [each.find_difference(sides, at) if len(readings) > 1 else None for each in readings]
    equal = [each for each, reason in zip(readings, why, strict=True) if reason is None]
    if not equal:
        chosen = min(readings, key=lambda each: each.count_differing_tensors(sides))
    elif len(equal) == 1:
        chosen = equal[0]
    else:  # some may differ in the names outside of attention
        chosen = next((each for each in equal if each.is_same(sides)), equal[0])
    is_decided = len(equal) in (0, len(readings)) or chosen.layouts[0] == chosen.layouts[1]
    lines = faults = [
        f"the {which} is not whole: {fault}"
        for which, side, layout in zip(SIDES, sides, chosen.layouts, strict=True)
        for fault in side.faults(layout)
    ]
    others = any(side.has_other_counts for side in sides)
    if others:
        lines = lines + [
            f"the {which} is {side.description}" for which, side in zip(SIDES, sides, strict=True)
        ]
    if not is_decided:
        lines = lines + _describe_readings(readings, why)
    elif len(readings) > 1:
        words = f"read as {' and '.join(layout.name for layout in chosen.layouts)}"
        rest = "" if equal else f"; no other of {len(readings)} ways to read them makes them equal"
        lines = [*lines, words + rest]
    can_run = not (others or faults)
    return replace(chosen, lines=tuple(lines), can_run=can_run, is_decided=is_decided)


def _describe_readings(readings: list[_Reading], why: list[str | None]) -> list[str]:
    outcomes: dict[str | None, dict[str, dict[str, set[int]]]] = {}
    for reading, reason in zip(readings, why, strict=True):
        names = " and ".join(layout.name for layout in reading.layouts)
        counts = outcomes.setdefault(reason, {}).setdefault(names, {})
        for name, values in reading.effects.items():
            counts.setdefault(name, set()).update(values)
    lines = []
    for reason, layouts in sorted(outcomes.items(), key=lambda each: each[0] is not None):
        ways = [
            ", ".join([names, *(f"{n} {_list_counts(values)}" for n, values in counts.items())])
            for names, counts in layouts.items()
        ]
        shown = "; ".join(results.shorten_lines(ways, NAMED))
        lines.append(f"read as {shown}: {reason or 'attention is equal'}")
    return lines


def _list_counts(values: set[int]) -> str:
    *most, last = results.shorten_lines(map(str, sorted(values)), NAMED)
    return f"{', '.join(most)} {'' if last.startswith('and') else 'or '}{last}" if most else last


def _choose_layouts(first: GivenWeights, second: GivenWeights, named: LayoutNames) -> _Reading:
    """Choose the layouts in which two sets of weights are compared.

    Agreement of the values decides nothing: where layouts or counts that fit have other verdicts,
    the result is not decided.

    Raises:
        OptionError: a named layout is contradicted, or counts fit no layout.
        UndecidedError: a set holds no attention of the catalogue.
    """
    counts = first.known | second.known  # one config may stand for both
    parameters = [f"{which}_layout" for which in SIDES]
    sides = (
        _make_side(first, named[0], parameters[0], counts),
        _make_side(second, named[1], parameters[1], counts),
    )
    for side, parameter in zip(sides, parameters, strict=True):
        if not side.candidates and side.layout is None:
            side.weights.require_fitting_counts(side.detection, **counts)
            side.detection.require_only_layout(file=side.weights.title, parameter=parameter)
    if sides[0].has_other_counts:  # only the first is converted
        counts = first.known
    readings = _list_readings(sides, counts)
    if not readings:  # a layout that is named does not fit: the comparison says why
        layouts = [side.layout or side.candidates[0].layout for side in sides]
        return _Reading((layouts[0], layouts[1]), counts)
    return _choose_reading(sides, readings)


def _make_side(
    weights: GivenWeights, name: str | Layout | None, parameter: str, counts: dict[str, int]
) -> _Side:
    detection = weights.detection(**counts)
    if name is None:
        fits = detection.fitting or detection.damaged
        alone = detection if fits else weights.detection()
        has_other_counts = not fits and bool(alone.fitting)
        detection = alone if has_other_counts else detection
        return _Side(weights, detection, detection.layout, has_other_counts)
    layout = weights.require_uncontradicted_layout(name, parameter)
    candidates, damaged = (
        tuple((candidate,) for group in groups for candidate in group if candidate.layout == layout)
        for groups in ((*detection.candidates, *detection.misplaced), detection.damaged)
    )
    return _Side(weights, Detection(candidates, {}, damaged=damaged), layout)


@explain_arguments(RENAMED_COUNTS)
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
    """Compare two sets of weights byte for byte, in the same layout or in two layouts.

    The first is converted to the layout of the second, tensor by tensor. Where names and shapes fit
    several layouts or numbers of heads, all are tried; the verdict is INCONCLUSIVE if it depends on
    them. The result is true if both are the same function; printed, it lists the tensors,
    projections and heads that differ.

    Args:
        first: a file of weights, a folder with them, or a state dict.
        second: likewise.
        first_layout: the layout of the first; None to detect it.
        second_layout: the layout of the second; None to detect it.
        config: the fields of config.json, for both; None to read the file beside each.
        outputs: run every layer of both in float64 as well.
        heads: query heads; needed only where no config has them.
        kv_heads: heads of keys and values.
        head_dim: channels of a head, in place of ``heads``.
        rotary_width: channels of a head that are rotated.
        progress: called with a label, the number of steps done and the number of all steps.

    Raises:
        CheckpointError: a path leads to no weights.
        OptionError: a config contradicts an argument, or counts are missing.
        UndecidedError: a set holds no attention of the catalogue.
    """
    _require_types({"first_layout": first_layout, "second_layout": second_layout}, progress)
    counts = dict(zip(COUNTS, (heads, kv_heads, head_dim, rotary_width), strict=True))
    mine = open_weights(first, counts, config=config, title="the first state dict")
    theirs = open_weights(second, counts, config=config, title="the second state dict")
    named = (first_layout, second_layout)
    diagnosis = verify_opened(mine, theirs, named, outputs=outputs, progress=progress)
    return diagnosis.with_notes(describe_cuts(first, second))


def verify_opened(
    first: GivenWeights,
    second: GivenWeights,
    named: LayoutNames = (None, None),
    *,
    outputs: bool = False,
    progress: Progress = no_progress,
) -> Diagnosis:
    """Compare two sets of weights that are open, as `verify` does."""
    contradictions = tuple(
        f"{name}: {count} in the first's config, {second.known[name]} in the second's"
        for name, count in first.known.items()
        if second.known.get(name, count) != count
    )
    if contradictions:
        return Diagnosis(verdict=Verdict.DIFFERENT, notes=contradictions)
    pair = _choose_layouts(first, second, named)
    mine, theirs, counts = *pair.layouts, pair.counts
    a, b = first.tensors, second.tensors
    compared = tensors.compare_tensors(
        a, b, mine, theirs, progress=progress, names_heads=pair.names_heads, **counts
    )
    layers = [module.layer for module in modules.find_modules(theirs, b)]
    conflicts = tensors.find_config_differences(first.config, second.config, pair.layouts, layers)
    compared = replace(compared, conflicts={**compared.conflicts, **conflicts})
    runs: Sequence[results.OutputComparison] = ()
    if outputs and pair.can_run and pair.is_decided and not compared.unheld:
        if not pair.names_heads:
            raise OptionError(
                saw="{outputs}, where neither the call nor a config has the number of heads",
                needed="the number of heads, on which the outputs depend",
                do="give {heads}, and {kv_heads} where they are fewer, or leave out {outputs}",
                parameter={"outputs": (), "heads": (), "kv_heads": ()},
            )
        config = first.config or second.config
        runs = tensors.compare_outputs_of_layers(a, b, mine, theirs, config, **counts)
    names = [*(tensor.name for tensor in compared.differences), *compared.only_second]
    moves = tensors.find_module_moves(a, b, pair.layouts, names if pair.can_run else (), counts)
    is_same = bool(compared) and all(layer.is_same for layer in runs)
    if is_same and not pair.is_decided:
        return Diagnosis(verdict=Verdict.INCONCLUSIVE, notes=pair.lines)
    return Diagnosis(
        verdict=Verdict.SAME if is_same else Verdict.DIFFERENT,
        layouts=pair.layouts,
        notes=pair.lines,
        tensors=compared,
        outputs=tuple(runs),
        moves=tuple(moves),
        unapplied=_find_unapplied_settings((first, second), pair.layouts),
    )


def _find_unapplied_settings(
    sides: tuple[GivenWeights, GivenWeights], layouts: tuple[Layout, Layout]
) -> tuple[results.UnappliedSetting, ...]:
    """Return what the metadata of one file record, and the code of its layout does not do."""
    if layouts[0] == layouts[1]:
        return ()
    return tuple(
        results.UnappliedSetting(side, layout.name, name, recorded, applied)
        for side, weights, layout in zip(SIDES, sides, layouts, strict=True)
        if weights.description is not None and layout.name in registry.layouts_by_name()
        for name, (recorded, applied) in layout.function.conflicts(
            registry.layouts_by_name()[layout.name].function
        ).items()
    )


def _require_types(layouts: Mapping[str, object], progress: object) -> None:
    for name, layout in layouts.items():
        if layout is not None and not isinstance(layout, (str, Layout)):
            raise OptionError(
                saw=f"{name} of type {type(layout).__name__}",
                needed="the name of a layout, or a Layout",
                do=f'give {name}="llama", or leave it out; headwise layouts lists the names',
            )
    if not callable(progress):
        raise OptionError(
            saw=f"progress of type {type(progress).__name__}",
            needed="a function of a label, the number of steps done and the number of all steps",
            do="give such a function, or leave progress out",
        )
