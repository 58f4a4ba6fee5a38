"""`verify`: byte-for-byte comparison of two sets of weights.

Where names and shapes fit several layouts, the values of the other set decide between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from headwise.checkpoints.config import Config
from headwise.checkpoints.stored_description import COUNTS
from headwise.diagnosis.candidate_layouts import CandidateLayout, query_and_kv_head_counts
from headwise.diagnosis.compare_weights_byte_for_byte import (
    UNREADABLE,
    compare_outputs_of_layers,
    compare_tensors,
)
from headwise.diagnosis.config_differences import find_config_differences
from headwise.diagnosis.detect import Given, GivenWeights, narrow_by_reference_values, open_weights
from headwise.diagnosis.detection_result import Detection
from headwise.diagnosis.diagnosis_result import Diagnosis, OutputComparison, Verdict
from headwise.diagnosis.name_weight_moves import ModuleMoves, find_module_moves
from headwise.errors import OptionError
from headwise.layouts.find_modules_by_tensor_names import find_modules
from headwise.layouts.layout import Layout
from headwise.support.progress_callback_type import Progress, no_progress

SIDES = ("first", "second")
INFERRED_COUNTS = ("heads", "kv_heads", "rotary_width")  # by values, where no config has them
LayoutNames = tuple[str | Layout | None, str | Layout | None]


@dataclass(frozen=True)
class LayoutPair:
    """Layouts in which two sets of weights are read.

    Attributes:
        layouts: of the first and of the second; None where their configs contradict each other.
        counts: heads, and other counts of the configs, the caller or the values.
        lines: the evidence for these layouts, or the reasons why the weights are not the same.
        can_run: True if the layers of both can be run.
        names_heads: True if the number of heads is known, so that heads can be named.
    """

    layouts: tuple[Layout, Layout] | None
    counts: dict[str, int]
    lines: tuple[str, ...]
    can_run: bool = True
    names_heads: bool = True


@dataclass(frozen=True)
class _Side:
    """One of the two sets of weights.

    ``layout`` is None if only the other side can decide it. ``has_other_counts`` is True if the
    weights fit a layout with their own counts and none with the counts of both.
    """

    weights: GivenWeights
    detection: Detection
    layout: Layout | None
    has_other_counts: bool = False

    @property
    def fitting_layouts_and_counts(self) -> list[tuple[Layout, dict[str, int]]]:
        """The layouts that fit, with the most heads that fit."""
        groups = self.detection.candidates or self.detection.damaged
        fitting = [(group[0].layout, group[0].fits[-1]) for group in groups]
        return fitting if self.layout is None else [*fitting, (self.layout, {})][:1]

    @property
    def description(self) -> str:
        """The name of the layout, with its counts."""
        candidate = next(_yield_candidates(self.detection), None)
        if candidate is None:
            return ""
        sizes = candidate.fits[0] if len(candidate.fits) == 1 else {}
        counts = ", ".join(f"{name} {sizes[name]}" for name in INFERRED_COUNTS if name in sizes)
        return candidate.layout.name + (f", with {counts}" if counts else "")

    def faults(self, layout: Layout | None) -> list[str]:
        """Return the missing and misfitting tensors in ``layout``, or in any layout if None."""
        return [
            fault
            for group in self.detection.damaged
            if layout is None or any(candidate.layout == layout for candidate in group)
            for fault in group[0].faults
        ]

    def has_open_heads(self, layout: Layout) -> bool:
        """True if several numbers of heads fit in ``layout``."""
        return any(
            len({*map(query_and_kv_head_counts, candidate.fits)}) > 1
            for group in self.detection.candidates or self.detection.damaged
            for candidate in group
            if candidate.layout == layout
        )

    def candidates_matching(self, other: _Side, *, called: str) -> Detection:
        """Return the candidates in which the tensors are those of ``other``."""
        mine, theirs = self.weights.tensors, other.weights.tensors
        return narrow_by_reference_values(
            self.detection, mine, other.detection, theirs, called=called
        )


Sides = tuple[_Side, _Side]
Trial = tuple[tuple[Layout, Layout], dict[str, int]]  # layouts and counts


def choose_layouts(first: GivenWeights, second: GivenWeights, named: LayoutNames) -> LayoutPair:
    """Choose the layouts in which two sets of weights are compared.

    Where the values of the two agree in no candidate, or a set lacks tensors, the layouts with the
    most equal tensors are chosen.

    Raises:
        OptionError: a named layout is contradicted, or counts fit no layout.
        UndecidedError: a set holds no attention of the catalogue.
    """
    contradictions = [
        f"{name}: {count} in the first's config, {second.known[name]} in the second's"
        for name, count in first.known.items()
        if second.known.get(name, count) != count
    ]
    if contradictions:
        return LayoutPair(None, {}, tuple(contradictions))
    counts = first.known | second.known  # one config may stand for both
    parameters = [f"{which}_layout" for which in SIDES]
    mine, theirs = sides = (
        _make_side(first, named[0], parameters[0], counts),
        _make_side(second, named[1], parameters[1], counts),
    )
    if mine.has_other_counts:  # only the first is converted
        counts = _pick_inferred_counts(mine.fitting_layouts_and_counts[0][1], {}) | first.known
    if mine.layout and theirs.layout:
        pairs = zip(SIDES, sides, strict=True) if any(s.has_other_counts for s in sides) else ()
        notes = tuple(f"the {which} is {side.description}" for which, side in pairs)
        notes += _describe_incomplete_sides(sides, (mine.layout, theirs.layout))
        return LayoutPair((mine.layout, theirs.layout), counts, notes, can_run=not notes)
    is_damaged = any(side.layout is None and side.faults(None) for side in sides)
    if is_damaged and mine.fitting_layouts_and_counts and theirs.fitting_layouts_and_counts:
        return _choose_layouts_of_damaged(sides, counts)
    for side, parameter in zip(sides, parameters, strict=True):
        if side.layout is None and not all(each.detection.candidates for each in sides):
            side.weights.require_fitting_counts(side.detection, **counts)
            side.detection.require_only_layout(file=side.weights.title, parameter=parameter)
    return _choose_layouts_by_values(sides, 0 if mine.layout is None else 1, counts)


def _make_side(
    weights: GivenWeights, name: str | Layout | None, parameter: str, counts: dict[str, int]
) -> _Side:
    detection = weights.detection(**counts)
    if name is None:
        fits = detection.candidates or detection.damaged
        alone = detection if fits else weights.detection()
        has_other_counts = not fits and bool(alone.candidates)
        detection = alone if has_other_counts else detection
        return _Side(weights, detection, detection.layout, has_other_counts)
    layout = weights.require_uncontradicted_layout(name, parameter)
    candidates, damaged = (
        tuple((candidate,) for group in groups for candidate in group if candidate.layout == layout)
        for groups in (detection.candidates, detection.damaged)
    )
    return _Side(weights, Detection(candidates, {}, damaged=damaged), layout)


def _pick_inferred_counts(sizes: dict[str, int], counts: dict[str, int]) -> dict[str, int]:
    return {n: sizes[n] for n in INFERRED_COUNTS if n in sizes and n not in counts}


def _choose_layouts_of_damaged(sides: Sides, counts: dict[str, int]) -> LayoutPair:
    """Choose layouts where a side lacks tensors: the same layout for both if one fits both."""
    first, second = sides
    pairs = [
        (mine, theirs)
        for mine in first.fitting_layouts_and_counts
        for theirs in second.fitting_layouts_and_counts
    ]
    pairs = [(mine, theirs) for mine, theirs in pairs if mine[0] == theirs[0]] or pairs
    trials = []
    for (mine, sizes), (theirs, others) in pairs:
        # the counts of the side without faults
        both = sizes | others if first.faults(mine) else others | sizes
        trials.append(((mine, theirs), counts | _pick_inferred_counts(both, counts)))
    (layouts, chosen), _ = _find_trial_with_most_equal(sides, trials)
    return LayoutPair(
        layouts,
        chosen,
        _describe_incomplete_sides(sides, layouts),
        can_run=False,
        names_heads=_heads_are_known(sides, layouts),
    )


def _heads_are_known(sides: Sides, layouts: tuple[Layout, Layout]) -> bool:
    return not any(side.has_open_heads(layout) for side, layout in zip(sides, layouts, strict=True))


def _describe_incomplete_sides(sides: Sides, layouts: tuple[Layout, Layout]) -> tuple[str, ...]:
    return tuple(
        f"the {which} is not whole: {fault}"
        for which, side, layout in zip(SIDES, sides, layouts, strict=True)
        for fault in side.faults(layout)
    )


def _choose_layouts_by_values(sides: Sides, at: int, counts: dict[str, int]) -> LayoutPair:
    """Choose layouts by values, where several fit ``sides[at]``."""
    undecided, other = sides[at], sides[1 - at]
    detection = undecided.candidates_matching(other, called=f"the {SIDES[1 - at]}")
    if not detection.candidates:
        return _choose_nearest_layouts(sides, at, detection, counts)
    mine = _likeliest_candidate(detection, other.layout)
    theirs = other.layout
    if theirs is None:
        chosen = _Side(undecided.weights, Detection(((mine,),), {}), mine.layout)
        matching = other.candidates_matching(chosen, called=f"the {SIDES[at]}")
        theirs = _likeliest_candidate(matching, mine.layout).layout
    inferred = _pick_inferred_counts(mine.fits[0], counts)
    words = "".join(f", {name} {count}" for name, count in inferred.items())
    layouts = (mine.layout, theirs) if at == 0 else (theirs, mine.layout)
    line = f"read as {layouts[0].name} and {layouts[1].name}{words}: their values agree"
    return LayoutPair(layouts, counts | inferred, (line,))


def _choose_nearest_layouts(
    sides: Sides, at: int, detection: Detection, counts: dict[str, int]
) -> LayoutPair:
    """Choose the layouts with the most equal tensors, where values agree in no candidate."""
    undecided, other = sides[at], sides[1 - at]
    theirs = other.layout or _likeliest_candidate(other.detection, None).layout
    candidates, trials = list(_yield_candidates(undecided.detection)), []
    for mine in candidates:
        layouts = (mine.layout, theirs) if at == 0 else (theirs, mine.layout)
        trials.append((layouts, counts | _pick_inferred_counts(mine.fits[-1], counts)))
    (layouts, chosen), equal = _find_trial_with_most_equal(sides, trials)
    line = f"read as {' and '.join(layout.name for layout in layouts)}"
    if 2 * equal > max(len(side.weights.tensors) for side in sides):
        line += ", where most tensors are equal"
    names = [candidate.layout.name for candidate in candidates]
    lines = (
        f"the {SIDES[at]} fits {len(trials)} layouts; in none of them are its values those of the "
        f"{SIDES[1 - at]}",
        line,
        *(f"not {name}: {detection.refuted[name]}" for name in names),
    )
    can_run = not any(side.has_other_counts for side in sides)
    names_heads = _heads_are_known(sides, layouts)
    return LayoutPair(layouts, chosen, lines, can_run=can_run, names_heads=names_heads)


def _find_trial_with_most_equal(sides: Sides, trials: list[Trial]) -> tuple[Trial, int]:
    """Return the trial with the most equal tensors, and their number; -1 if none can be read."""
    first, second = (side.weights.tensors for side in sides)
    equal = [-1] * len(trials)
    for number, ((mine, theirs), counts) in enumerate(trials):
        with suppress(*UNREADABLE):
            compared = compare_tensors(
                first, second, mine, theirs, progress=no_progress, names_heads=False, **counts
            )
            equal[number] = compared.same
    most = max(equal)
    return trials[equal.index(most)], most


def _likeliest_candidate(detection: Detection, other: Layout | None) -> CandidateLayout:
    """Return the candidate in the layout ``other``, or else the one that names most tensors."""
    name = None if other is None else other.name
    return min(
        _yield_candidates(detection), key=lambda each: (each.layout.name != name, -each.around)
    )


def _yield_candidates(detection: Detection) -> Iterator[CandidateLayout]:
    return (candidate for group in detection.candidates for candidate in group)


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
    several layouts, the values of the other set decide. The result is true if both are the same
    function; printed, it lists the tensors, projections and heads that differ.

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
    pair = choose_layouts(mine, theirs, (first_layout, second_layout))
    return _make_diagnosis(mine, theirs, pair, outputs=outputs, progress=progress)


def _make_diagnosis(
    first: GivenWeights,
    second: GivenWeights,
    pair: LayoutPair,
    *,
    outputs: bool,
    progress: Progress,
) -> Diagnosis:
    if pair.layouts is None:
        return Diagnosis(verdict=Verdict.DIFFERENT, layouts=None, notes=pair.lines, tensors=None)
    mine, theirs, counts = *pair.layouts, pair.counts
    tensors = compare_tensors(
        first.tensors,
        second.tensors,
        mine,
        theirs,
        progress=progress,
        names_heads=pair.names_heads,
        **counts,
    )
    layers = [module.layer for module in find_modules(theirs, second.tensors)]
    conflicts = find_config_differences(first.config, second.config, pair.layouts, layers)
    tensors = replace(tensors, conflicts={**tensors.conflicts, **conflicts})
    runs: list[OutputComparison] = []
    if outputs and pair.can_run and not tensors.unheld:
        config = first.config or second.config
        runs = compare_outputs_of_layers(
            first.tensors, second.tensors, mine, theirs, config, **counts
        )
    moves: list[ModuleMoves] = []
    if tensors.differences and pair.can_run:
        differing = [tensor.name for tensor in tensors.differences]
        moves = find_module_moves(first.tensors, second.tensors, pair.layouts, differing, counts)
    is_same = bool(tensors) and all(layer.is_same for layer in runs)
    return Diagnosis(
        verdict=Verdict.SAME if is_same else Verdict.DIFFERENT,
        layouts=pair.layouts,
        notes=pair.lines,
        tensors=tensors,
        outputs=tuple(runs),
        moves=tuple(moves),
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
